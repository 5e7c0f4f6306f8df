"""The scripts in benchmarks/: what is required at which size, and the fit of the cost model. No times."""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from polynl.bench.measure import Task

FOLDER = Path(__file__).parents[2] / "benchmarks"
Seconds = Callable[[str], float]


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """check_targets.py, which builds layers for real but no large maps."""
    module = script("check_targets", monkeypatch)
    monkeypatch.setattr(module, "peak_bytes", lambda _: 1)
    monkeypatch.setattr(module, "_map", lambda point: torch.zeros(1, point.channels, 2, 2))
    return module


def checker(targets: ModuleType, seconds: Seconds, **options: Any) -> Any:
    """A checker for which every task takes the seconds of its name."""

    class Fake(targets.Checker):  # type: ignore[misc, name-defined]
        def medians(self, tasks: Mapping[str, Task], most: int = 20) -> tuple[dict[str, float], int]:
            self.tasks = dict(tasks)
            return {name: seconds(name) for name in tasks}, most

    settings = targets.Options(max_conv_seconds=float("inf"), **options)
    return Fake(settings, Console(file=StringIO()))


def on_the_grid(targets: ModuleType, c: int, side: int) -> list[tuple[str, str]]:
    found = checker(targets, {"conv": 1.0, "auto": 2.0, "direct": 5.0, "gram": 2.0}.__getitem__)
    found._at_size(1, c, side, targets.ON_THE_GRID)
    return [(check.group, check.required) for check in found.checks]


AUTO = ("auto", "≤ 1.1")


@pytest.mark.parametrize(
    ("c", "side", "required"),
    [
        (64, 28, [("memory", "≤ 1.3"), ("forward", "≤ 1.9"), ("training", "≤ 1.75")]),
        (64, 27, [("forward", "≤ 2.4")]),
        (64, 16, [("forward", "≤ 2.4")]),
        (64, 15, []),
        (256, 16, []),
        (256, 15, [("wide", "≤ 3.2"), ("wide", "≤ 3.2")]),
        (256, 14, [("wide", "≤ 3.2"), ("wide", "≤ 3.2")]),
        (256, 13, []),
        (255, 14, []),
    ],
)
def test_every_size_has_the_targets_of_its_range(
    targets: ModuleType, c: int, side: int, required: list[tuple[str, str]]
) -> None:
    found = on_the_grid(targets, c, side)
    assert [entry for entry in found if entry != AUTO] == required
    assert found.count(AUTO) == 2, "one for each step"


def test_the_median_is_that_of_the_sizes_with_many_positions(targets: ModuleType) -> None:
    ratios = iter([1.7, 1.5, 1.9, 1.6, 1.82, 1.7])  # of both steps at one size after the other
    found = checker(targets, lambda name: 1.0 if name == "conv" else next(ratios))
    for side in (28, 56, 27, 7, 112):
        found._at_size(1, 64, side, {"median"})
    found._over_sizes()
    assert [(check.where, check.measured, check.required, check.ok) for check in found.checks] == [
        ("3 sizes, forward", 1.82, "≤ 1.8", False),
        ("3 sizes, training", 1.6, "≤ 1.65", True),
    ]


def test_a_small_map_is_called_many_times_in_each_run(targets: ModuleType) -> None:
    found = checker(targets, {"conv": 1.0, "poly_nl": 3.1}.__getitem__)
    found.small()
    (check,) = found.checks
    assert (check.measured, check.required, check.ok) == (3.1, "≤ 3", False)
    assert found.tasks.keys() == {"conv", "poly_nl"}
    calls: list[int] = []
    targets._repeated(Task(lambda: calls.append(1)), targets.CALLS).run()
    assert len(calls) == 50


def test_layouts_are_compared_by_the_difference_of_their_ratios(targets: ModuleType) -> None:
    seconds = {
        "conv NCHW": 2.0,
        "poly_nl NCHW": 4.0,
        "conv channels_last": 1.0,
        "poly_nl channels_last": 2.25,
    }
    found = checker(targets, seconds.__getitem__, quick=True)
    found.channels_last()
    assert [(check.measured, check.required, check.ok) for check in found.checks] == [
        (0.25, "≤ 0.3", True)
    ] * 2
    layouts = {
        name: one.run().is_contiguous(memory_format=torch.channels_last) for name, one in found.tasks.items()
    }
    assert layouts == {name: "channels_last" in name for name in seconds}


def test_a_network_has_a_target_for_each_reduction(targets: ModuleType) -> None:
    seconds = {"plain": 1.0, "reduction 1": 1.16, "reduction 4": 1.07}
    found = checker(targets, seconds.__getitem__, quick=True)
    found.resnet()
    assert [(check.measured, check.required, check.ok) for check in found.checks] == [
        (1.16, "≤ 1.17", True),
        (1.07, "≤ 1.06", False),
    ]


def test_every_group_is_checked_somewhere(targets: ModuleType) -> None:
    assert targets.ON_THE_GRID | set(targets.OFF_THE_GRID) == set(targets.GROUPS)
    assert all(callable(getattr(targets.Checker, group)) for group in targets.OFF_THE_GRID)


def test_one_missed_target_is_an_exit_code(
    targets: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "checks.json"
    monkeypatch.setattr(sys, "argv", ["", "--quick", "--only", "small", "--out", str(out)])
    for ratio, code in ((2.0, 0), (4.0, 1)):
        seconds = {"conv": 1.0, "poly_nl": ratio}
        monkeypatch.setattr(targets.Checker, "medians", lambda *_, seconds=seconds: (seconds, 5))
        with pytest.raises(SystemExit) as ended:
            targets.main()
        assert ended.value.code == code
        content = json.loads(out.read_text())
        assert content["allocator_primed"] in (True, False)
        assert [check["measured"] for check in content["checks"]] == [ratio]


def test_the_fit_finds_constants_that_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = script("fit_forms", monkeypatch)
    true = fit.FormCosts(product=0.7, matrix=2.0, element=80)
    assert true != fit.MEASURED
    results = {
        (1, c, side): {
            step: {form: 1.0 if form == best else 2.0 for form in ("direct", "gram")}
            for step in fit.STEPS
            for best in [fit.cheaper_form(side**2, c, c, step == "training", true)]
        }
        for c in (64, 256, 1024)
        for side in range(7, 57)
    }
    assert fit.losses(results, fit.MEASURED)[-1][0] == 2.0
    _, lost = fit.fitted(results)
    assert {loss for loss, *_ in lost} == {1.0}


def test_kept_measurements_are_fitted_again_without_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = script("fit_forms", monkeypatch)
    keep = tmp_path / "times.json"
    keep.write_text(json.dumps([((1, 64, 7), {step: {"direct": 1.0, "gram": 2.0} for step in fit.STEPS})]))
    monkeypatch.setattr(sys, "argv", ["", "--keep", str(keep)])
    monkeypatch.delattr(fit, "interleaved_seconds")
    fit.main()
    assert "ONE_MAP = FormCosts(product=0.6" in (said := capsys.readouterr().out)
    assert "MEASURED = FormCosts(product=0.6" in said


def test_a_loss_is_that_of_the_chosen_form(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = script("fit_forms", monkeypatch)
    results = {
        (1, 64, 56): {"forward": {"direct": 2.0, "gram": 3.0}, "training": {"direct": 5.0, "gram": 1.0}}
    }
    never, always = fit.FormCosts(99, 99, 0), fit.FormCosts(0, 0, 99)
    assert [loss for loss, *_ in fit.losses(results, never)] == [1.0, 5.0]
    assert [loss for loss, *_ in fit.losses(results, always)] == [1.0, 1.5]
