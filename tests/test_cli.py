"""The command line: help, errors with near matches, exit codes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import run

from polynl import cli
from polynl.bench import layers
from polynl.files import write_atomically

COMMANDS = (
    "reproduce",
    "train",
    "evaluate",
    "evaluate-faces",
    "predict",
    "apply",
    "explain",
    "export",
    "report",
    "bench layers",
    "bench nets",
    "bench compare",
    "blocks",
    "recipes",
    "data scenes",
)
BENCH = "bench layers --blocks poly_nl --channels 4 --at-side 4 --sides 4 8 --at-channels 4 --runs 2"


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert out.startswith("usage: polynl COMMAND …\n")
    first = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert set(cli.COMMANDS.commands) <= first, "a line for each"


def test_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench")
    assert code == 0
    assert all(word in out for word in ("layers", "nets", "compare"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_reads_well_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0
    usage, text = out.split("\n\n", 1)
    assert usage.startswith(f"usage: polynl {command}")
    if command in ("reproduce", "bench layers", "bench nets"):  # tyro does not wrap a long description
        text = text.partition(" options ")[2]
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in out
    assert "False" not in out
    assert "..." not in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("benhc", "Did you mean bench?"),
        ("trian scenes", "no command is called 'trian'. Did you mean train?"),
        ("train scenes --epoch 3", "epoch: there is no such key. Did you mean epochs?"),
        ("train scenes --overwrit true", "overwrit: there is no such key. Did you mean overwrite?"),
        ("bench layer", "Did you mean layers?"),
        ("bench layers --chanels 3", "--channels"),
        ("bench layers --blocks poly_nll", "Did you mean poly_nl"),
        ("bench layers --runs 0", "--runs 0: expected a number above 0"),
        ("bench layers --runs many", "many"),
        ("bench layers --device tpu", "cpu"),
        ("bench nets --placements res44", "Did you mean res4"),
        ("bench nets --blocks poly", "Did you mean poly_nl"),
        ("bench compare no.json such.json", "no.json"),
    ],
)
def test_a_mistake_gets_a_few_lines_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert expected in " ".join(err.replace("│", " ").split())
    assert len(err.splitlines()) <= 12
    assert "Traceback" not in err


def test_an_interrupted_run_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layers, "run_layers", interrupted)
    code, _, err = run(capsys, "bench", "layers")
    assert code == 130
    assert "--resume" in err


@pytest.mark.parametrize(
    ("take", "message"),
    [
        (lambda *_: torch.empty(1 << 50), "out of memory. Lower --batch, or measure smaller sizes"),
        (lambda *_: [os.open(os.devnull, 0) for _ in range(10**9)], "too many files are open: raise the"),
    ],
)
def test_what_runs_out_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[..., object],
    message: str,
) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no limits of these kinds")
    monkeypatch.setattr(layers, "run_layers", take)
    before, opened = resource.getrlimit(resource.RLIMIT_NOFILE), set(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 256), before[1]))
    try:
        code, _, err = run(capsys, "bench", "layers")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in set(os.listdir("/dev/fd")) - opened:
            with contextlib.suppress(OSError):
                os.close(int(number))
    assert code == 1
    assert err.startswith(f"polynl: {message}")
    assert err.endswith("add --resume to continue.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files")
def test_a_benchmark_on_a_full_disk_names_the_file_and_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import resource

    measured, before = tmp_path / "layers.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, before[1]))  # more than the JSON, less than a figure
    try:
        code, _, err = run(capsys, *BENCH.split(), "--out", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert err == (
        f"polynl: {tmp_path}/layers-forward.png: File too large. "
        "Finished work is kept; add --resume to continue.\n"
    )
    kept = measured.read_bytes()
    code, _, err = run(capsys, *BENCH.split(), "--out", tmp_path, "--resume")
    assert (code, err) == (0, "")
    assert measured.read_bytes() == kept, "nothing was measured again"
    assert (tmp_path / "layers-forward.png").exists()


def test_options_arrive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layers, "save_layer_figures", lambda *_: [])  # they take longer than all else
    code, out, _ = run(capsys, *BENCH.split(), "--out", str(tmp_path))
    assert code == 0
    assert "Poly-NL" in out
    path = str(tmp_path / "layers.json")
    code, out, _ = run(capsys, "bench", "compare", path, path, "--all")
    assert code == 0
    assert "1.00×" in out


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "polynl"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: polynl")


def test_names_in_brackets_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layers, "save_layer_figures", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, *BENCH.split(), "--out", "my[test]/[/x]")
    assert code == 0
    assert "Written: my[test]/[/x]/layers.json" in out


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_atomically(link, "content")
    assert link.is_symlink()
    assert target.read_text() == "content"
    write_atomically(Path(os.devnull), "content")
    assert not Path(os.devnull).is_file()


def test_merge_keys_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nine lines of them would take forever."""
    lines = ["a: &a {x: 1}", "b: &b {<<: [*a, *a]}"]
    (tmp_path / "merge.yaml").write_text("\n".join(lines))
    code, _, err = run(capsys, "train", tmp_path / "merge.yaml")
    assert code == 2
    assert "<< cannot be used in recipes; use base" in err
