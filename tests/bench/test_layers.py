"""`polynl bench layers` from end to end: points, skips, tables, figures, and resuming after a kill."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from rich.console import Console
from torch import Tensor, nn

from polynl.bench import layers, runner
from polynl.bench.cases import CASES, LOOKS, PEERS
from polynl.bench.layers import layer_points, run_layers, selected_cases
from polynl.bench.measure import Task, task
from polynl.bench.plots import layer_figure
from polynl.bench.settings import LayerSettings, NetSettings
from polynl.blocks.registry import BLOCKS
from polynl.errors import SettingsError
from polynl.results.benchmark import MEMORY, Measurement, Point, Results, Step
from polynl.results.formats import byte_size, duration, ratio
from polynl.results.tables import layer_tables, shape_tables

TINY = LayerSettings(
    blocks=("poly_nl", "non_local"), channels=(4, 8), at_side=4, sides=(4, 6, 8), at_channels=8, runs=3
)


ONE_SIZE = replace(TINY, channels=(8,), sides=(4,))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than measuring."""
    monkeypatch.setattr(layers, "save_layer_figures", lambda *_: [])


def quiet() -> Console:
    return Console(file=StringIO(), width=100)


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_sizes_of_both_sweeps_are_measured_once() -> None:
    points = layer_points(TINY)
    assert len(points) == len(set(points)) == 2 * (2 + 3 - 1)
    assert {(p.side, p.channels) for p in points} == {(4, 4), (4, 8), (6, 8), (8, 8)}
    assert [p.side for p in points] == sorted(p.side for p in points)


def test_shapes_of_ones_own_take_the_place_of_the_sweeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shape", 2, 8, 4, 6, 1, 4, 3, 3, "--blocks", "poly_nl", "--runs", 2, "--out", tmp_path]
    code, shown, err = run(capsys, "bench", "layers", *words)
    assert (code, err) == (0, "")
    assert "Forward, maps of 2×8×4×6" in shown
    assert "Forward + backward, maps of 1×4×3×3" in shown
    results = Results.load(tmp_path / "layers.json")
    assert [str(m.point) for m in results.measurements if m.method == "poly_nl"] == [
        *("forward, 1×4×3×3", "training, 1×4×3×3", "forward, 2×8×4×6", "training, 2×8×4×6")
    ]
    assert results.command.endswith("--shape 2 8 4 6 1 4 3 3")
    # A row of the table: time, ratio, spread, memory, ratio.
    first, *_ = shape_tables(results)
    m = results.at("poly_nl", Point("forward", 2, 4, 8, 6))
    assert m is not None
    assert first.lines()[2][-2:] == [byte_size(m.peak_bytes or 0), ratio(results.ratio(m, MEMORY))]
    assert not list(tmp_path.glob("*.png")), "there is no sweep to draw"
    code, _, err = run(capsys, "bench", "layers", *words, "--resume")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": ((1, 8, 4, 4),), "sides": (4,)}, "--sides is for the sweeps, which --shape replaces"),
        ({"shape": ((1, 8, 0, 4),)}, "--shape 0: expected a number above 0"),
    ],
)
def test_shapes_that_cannot_be_measured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        LayerSettings(**options)


def test_times_of_a_busy_machine_have_no_ratios() -> None:
    point, quiet_one = Point("forward", 1, 4, 8), Point("forward", 1, 6, 8)
    calm, busy = (1.0, 1.0, 1.1, 1.0), (1.0, 1.0, 40.0, 50.0)
    methods = {name: {"label": name} for name in ("conv1x1", "poly_nl", "tesa")}
    results = Results("layers", "", dict(TINY.measured()), {}, methods, "conv1x1")
    results.measurements = [
        *(Measurement("conv1x1", at, calm, 10) for at in (point, quiet_one)),
        Measurement("poly_nl", point, busy, 20),
        *(Measurement("poly_nl", at, calm, 20) for at in (quiet_one,)),
        Measurement("tesa", point, skipped="too slow"),
    ]
    _, times, memory, *_ = layer_tables(results)
    assert times.lines()[2][1:3] == ["busy", "1.00"]
    assert times.lines()[3][1:3] == ["–", "–"]
    assert memory.lines()[2][1:3] == ["2.00", "2.00"], "memory does not depend on it"
    assert "the machine was busy" in results.notes()[0]
    # A busy reference spoils the ratios of all others at its size.
    results.measurements[0] = Measurement("conv1x1", point, busy, 10)
    results.measurements[2] = Measurement("poly_nl", point, calm, 20)
    assert results.ratio(results.measurements[2]) is None
    assert results.ratio(results.measurements[3]) == 1.0
    results.measurements[0] = Measurement("conv1x1", point, calm, 10)
    assert results.ratio(results.measurements[2]) == 1.0
    assert not results.notes()


def test_a_run_leaves_results_tables_and_figures(tmp_path: Path) -> None:
    console = quiet()
    results = run_layers(replace(TINY, out=tmp_path), console)
    assert Results.load(tmp_path / "layers.json") == results
    assert list(results.methods) == ["conv1x1", "poly_nl", "non_local"]
    assert len(results.measurements) == 3 * len(layer_points(TINY))
    assert all(len(m.seconds) == 3 and m.peak_bytes and m.skipped is None for m in results.measurements)
    assert [len(results.sweep(axis, "forward")) for axis in ("channels", "positions")] == [2, 3]
    page = (tmp_path / "layers.md").read_text()
    for text in (printed(console), page):
        assert text.count("Poly-NL") >= 6
        assert "Peak memory, forward + backward, at 8 channels" in text
    assert page.startswith("`polynl bench layers --runs 3 --blocks poly_nl non_local")
    for step in ("forward", "training"):
        assert (tmp_path / f"layers-{step}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (tmp_path / f"layers-{step}.svg").read_text()


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("primed", [True, False])
def test_a_run_says_whether_the_allocator_was_primed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, primed: bool
) -> None:
    monkeypatch.setattr(runner, "prime_allocator", lambda: primed)
    console = quiet()
    results = run_layers(replace(ONE_SIZE, out=tmp_path), console)
    assert results.settings["allocator_primed"] is primed
    said = "The allocator was primed" if primed else "The allocator was not primed"
    assert said in printed(console)
    assert said in (tmp_path / "layers.md").read_text()


@pytest.mark.usefixtures("without_figures")
def test_float16_on_cpus_has_times_but_no_ratios(tmp_path: Path) -> None:
    console = quiet()
    results = run_layers(replace(TINY, out=tmp_path, dtype="float16"), console)
    assert all(m.median for m in results.measurements)
    page = (tmp_path / "layers.md").read_text()
    for text in (printed(console), page):
        assert "divided" not in text
        assert "There are no ratios, because float16 convolutions are unusually slow on CPUs." in text
    rows = [line.split(" | ")[1:3] for line in page.splitlines() if line.startswith("| Poly-NL")]
    assert rows
    assert all(cell.endswith(("µs", "ms", "KiB")) for row in rows for cell in row)


@pytest.mark.usefixtures("without_figures")
def test_too_large_a_prediction_is_skipped_with_its_reason_everywhere(tmp_path: Path) -> None:
    # Two matrices of 64 × 64 floats are 32 KiB, two of 36 × 36 are 10 KiB.
    settings = replace(TINY, memory_limit_gib=20 / 2**20, out=tmp_path)
    console = quiet()
    results = run_layers(settings, console)
    skipped = [m for m in results.measurements if m.skipped]
    assert {(m.method, m.point.side) for m in skipped} == {("non_local", 8)}
    assert {m.point.step for m in skipped} == {"forward", "training"}
    for m in skipped:
        assert m.seconds == ()
        assert m.skipped is not None
        assert "needs 32.0 KiB" in m.skipped
    assert "not measured at N = 64: needs 32.0 KiB" in printed(console)
    assert "not measured at N = 64" in (tmp_path / "layers.md").read_text()
    for step in ("forward", "training"):
        figure = layer_figure(results, step)  # type: ignore[arg-type]
        (note,) = [text.get_text() for text in figure.texts if "not measured" in text.get_text()]
        assert note.count("needs 32.0 KiB") == 1, "a figure explains its own step only"
        crosses = [line for line in figure.axes[1].get_lines() if line.get_marker() == "x"]
        assert [list(line.get_xdata()) for line in crosses] == [[64]]


@pytest.mark.usefixtures("without_figures")
def test_too_slow_a_method_is_skipped_from_there_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fake_timed(_: Task, device: str) -> float:
        tried.append(device)
        return 99.0

    monkeypatch.setattr(runner, "timed", fake_timed)
    results = run_layers(replace(TINY, blocks=("conv1x1",), out=tmp_path, channels=(8,)), quiet())
    assert len(tried) == 2, "once for each step, at the smallest map"
    assert {m.skipped for m in results.measurements} == {"one step takes 99.0 s at N = 16, limit 10 s"}
    assert len(results.skipped_lines()) == 2
    assert "at N ≥ 16" in results.skipped_lines()[0]


def test_out_of_memory_is_a_reason_and_other_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(message: str) -> None:
        def peak(*_: object) -> int:
            raise RuntimeError(message)

        monkeypatch.setattr(runner, "peak_bytes", peak)

    fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
    results = run_layers(replace(ONE_SIZE, out=tmp_path / "a"), quiet())
    assert {m.skipped for m in results.measurements} == {"out of memory"}
    fail("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run_layers(replace(ONE_SIZE, out=tmp_path / "b"), quiet())


def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PEERS", [replace(PEERS[0], package="no_such_package")])
    monkeypatch.setitem(layers.BY_NAME, PEERS[0].name, layers.PEERS[0])
    console = quiet()
    cases = selected_cases(replace(TINY, peers=True), console)
    assert PEERS[0].name not in [case.name for case in cases]
    assert "no_such_package is not installed" in printed(console)


def test_peers_are_there_when_asked_for() -> None:
    asked = selected_cases(replace(TINY, peers=True), quiet())
    available = [peer.name for peer in PEERS if peer.available()]
    assert [case.name for case in asked] == ["conv1x1", "poly_nl", "non_local", *available]


def test_every_layer_has_a_look_of_its_own() -> None:
    names = [case.name for case in (*CASES, *PEERS)]
    assert names == list(LOOKS)
    assert len({(style.marker, style.line) for style, _ in LOOKS.values()}) == len(LOOKS)


def test_all_blocks_can_be_measured_by_their_names() -> None:
    assert LayerSettings(blocks=("all",)) == LayerSettings()
    assert LayerSettings(blocks=("se", "all", "se")).blocks[0] == "se"
    assert LayerSettings(blocks=("conv", "grn")).blocks == ("conv1x1", "grn")
    assert NetSettings(blocks=("all",)).blocks == LayerSettings().blocks
    for block in BLOCKS:
        assert LayerSettings(blocks=(block,)).blocks
    with pytest.raises(SettingsError, match="no layer is called 'al'"):
        LayerSettings(blocks=("al",))


@pytest.mark.usefixtures("without_figures")
def test_a_layer_of_another_dtype_layout_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def watched(module: nn.Module, x: Tensor, step: Step) -> Task:
        given.append((next(module.parameters()).dtype, x))
        return task(module, x, step)

    monkeypatch.setattr(runner, "task", watched)
    run_layers(replace(ONE_SIZE, dtype="bfloat16", channels_last=True, seed=3, out=tmp_path), quiet())
    assert given
    drawn = torch.randn(1, 8, 4, 4, generator=torch.Generator().manual_seed(3)).bfloat16()
    for dtype, x in given:
        assert dtype == torch.bfloat16
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(x, drawn)


@pytest.mark.usefixtures("without_figures")
def test_exponents_come_from_the_positions(tmp_path: Path) -> None:
    results = run_layers(replace(TINY, out=tmp_path, blocks=("conv1x1",)), quiet())
    results.measurements = [replace(m, seconds=(float(m.point.side**3),) * 3) for m in results.measurements]
    assert results.exponent("conv1x1", "positions", "forward") == pytest.approx(1.5)


def test_durations_have_three_digits() -> None:
    assert [duration(s) for s in (1.234e-5, 1.5e-4, 1.2e-3, 0.0456, 0.99, 12.3)] == [
        "12.3 µs",
        "150 µs",
        "1.20 ms",
        "45.6 ms",
        "990 ms",
        "12.3 s",
    ]


# Resuming


@pytest.mark.usefixtures("without_figures")
def test_a_run_is_never_overwritten_unasked(tmp_path: Path) -> None:
    settings = replace(ONE_SIZE, out=tmp_path)
    first = run_layers(settings, quiet())
    with pytest.raises(SettingsError, match=r"--resume.*--overwrite.*--out"):
        run_layers(settings, quiet())
    assert run_layers(replace(settings, resume=True), quiet()) == first
    assert run_layers(replace(settings, overwrite=True), quiet()).measurements != first.measurements


@pytest.mark.usefixtures("without_figures")
def test_another_run_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_layers(replace(ONE_SIZE, out=tmp_path), quiet())
    with pytest.raises(SettingsError, match=r"other settings.*\n  runs: 3 → 4\n  seed: 0 → 1"):
        run_layers(replace(ONE_SIZE, out=tmp_path, resume=True, runs=4, seed=1), quiet())
    monkeypatch.setattr(runner, "environment", lambda _: {"cpu": "another"})
    with pytest.raises(SettingsError, match=r"other environment.*\n(.*\n)*.*cpu: .* → another"):
        run_layers(replace(ONE_SIZE, out=tmp_path, resume=True), quiet())


def test_a_point_that_lacks_a_method_is_measured_anew(tmp_path: Path) -> None:
    points = [Point("forward", 1, side, 1) for side in (1, 2)]
    results = Results("layers", "", {}, {}, {"a": {"label": "A"}, "b": {"label": "B"}}, "a")
    results.measurements = [Measurement(method, point, (1.0,), 1) for point in points for method in "ab"]
    whole = list(results.measurements)
    results.measurements.pop(1)

    def build(method: str, point: Point) -> tuple[nn.Module, Tensor]:
        return nn.Identity(), torch.ones(1)

    settings = replace(TINY, runs=1)
    runner.measure_points(results, tmp_path / "a.json", points, build, lambda *_: None, settings, quiet())
    assert results.measurements[:2] == whole[2:]
    assert [(m.method, m.point) for m in results.measurements[2:]] == [("a", points[0]), ("b", points[0])]


def measurements(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())["measurements"] if path.exists() else []


# `polynl`, which is killed while it measures the third point.
KILLED = """
import os, signal, sys
from polynl import cli
from polynl.bench import runner

measure, calls = runner.interleaved_seconds, []

def measure_or_die(*args, **options):
    calls.append(args)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*args, **options)

runner.interleaved_seconds = measure_or_die
cli.main(sys.argv[1:])
"""


@pytest.mark.usefixtures("without_figures")
def test_a_killed_run_is_resumed_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--channels 4 8 16 --at-side 4 --sides 4 6 8 10 --at-channels 8 --runs 3 --threads 1"
    words = ["bench", "layers", "--blocks", "poly_nl", *sizes.split(), "--out", str(tmp_path)]
    path = tmp_path / "layers.json"
    every = 2 * 2 * (3 + 4 - 1)
    process = subprocess.run([sys.executable, "-c", KILLED, *words], stdout=subprocess.DEVNULL)
    assert process.returncode == -signal.SIGKILL
    kept = measurements(path)
    assert len(kept) == 2 * 2 < every
    code, _, err = run(capsys, *words, "--resume")
    assert code == 0, err
    finished = measurements(path)
    assert finished[: len(kept)] == kept
    assert len(finished) == every
    assert len({(m["method"], m["step"], m["side"], m["channels"]) for m in finished}) == every
