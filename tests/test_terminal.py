"""`polynl` as a shell knows it: signals from its first moments on, other encodings, pipes that are closed."""

from __future__ import annotations

import codecs
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run

from polynl import terminal

COMMAND = [sys.executable, "-m", "polynl", "train", str(Path(__file__).parent / "train" / "tiny.yaml")]
SET_UP = "from polynl.terminal import set_up_streams; set_up_streams();"


def heeds_sigterm(process: int) -> bool:
    """Whether it has a handler of SIGTERM, which Python itself does not install."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def loads_torch(process: int) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the moment")
@pytest.mark.parametrize("moment", [heeds_sigterm, loads_torch])
@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGINT, "polynl: interrupted.\n"), (signal.SIGTERM, "polynl: stopped by SIGTERM.\n")],
)
def test_a_signal_before_there_is_anything_to_lose(
    number: signal.Signals, message: str, moment: Callable[[int], bool]
) -> None:
    # A shell starts background commands with SIGINT ignored, and maybe these tests.
    started = subprocess.Popen(
        ["env", "--default-signal=INT", *COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not moment(started.pid):
        assert started.poll() is None
        time.sleep(0.001)
    started.send_signal(number)
    assert started.communicate(timeout=60) == ("", message)
    assert started.returncode == 128 + number


def test_while_a_command_runs_a_signal_is_an_exception_and_the_next_one_ends_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        terminal.end_on_signals()
        with pytest.raises(terminal.Interrupted) as raised, terminal.CleaningUp():
            signal.raise_signal(signal.SIGTERM)
        assert raised.value.exit_code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


COMMANDS = ["", "reproduce", "train", "evaluate", "evaluate-faces", "predict", "explain", "report"]
COMMANDS += ["bench layers", "bench nets", "bench compare", "data scenes"]


def test_every_help_can_be_printed_in_ascii(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codecs.register_error("polynl.plain", terminal._plain)
    with monkeypatch.context() as patched:
        for command in COMMANDS:
            output = io.BytesIO()
            patched.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii", "polynl.plain"))
            code, _, err = run(capsys, *command.split(), "--help")
            sys.stdout.flush()
            assert (code, err) == (0, ""), command
            assert output.getvalue().startswith(b"usage: polynl"), command


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"},
    ],
)
def test_what_a_terminal_cannot_show_is_replaced(environment: dict[str, str]) -> None:
    text = ascii("1×1 … 3 µs é 図 \udcff")
    program = f"{SET_UP} import sys; print({text}); print({'≥'!a}, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"1x1 ... 3 us e ? ?\n", b">=\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_nobody_reads_changes_nothing(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = f"{SET_UP} print('x' * 100_000, flush=True); print('y'); raise SystemExit(7)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_output_that_cannot_be_written_is_named() -> None:
    program = f"{SET_UP}\ntry: print('x', flush=True)\nexcept OSError as error: exit(str(error))"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "[Errno 28] No space left on device: 'standard output'\n"


def test_without_streams_there_is_no_output() -> None:
    program = f"{SET_UP} import sys; print('x'); print('y', file=sys.stderr)"
    command = f'exec {sys.executable} -c "{program}" >&- 2>&-'
    assert subprocess.run(command, shell=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["recipes"], 0, "imagenet"),
        (["train", "imagenot"], 2, "Did you mean imagenet"),
        (["--oops"], 2, "oops"),
    ],
)
def test_under_torchrun_it_ends_without_a_shutdown_that_aborts(
    words: list[str], code: int, said: str
) -> None:
    program = (
        f"import atexit, os, sys; atexit.register(os.abort); sys.argv = ['polynl', *{words}];"
        "from polynl.__main__ import main; main()"
    )
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (ended.returncode, said in ended.stdout + ended.stderr) == (code, True), ended
