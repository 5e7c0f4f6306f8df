"""`polynl bench compare`: ratios, what is outside the spread, and other environments."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from polynl.bench.compare import Change, changes, run_compare
from polynl.errors import SettingsError
from polynl.results.benchmark import Measurement, Point, Results

POINT = Point("forward", 1, 8, 4)
OLD = (1.0, 1.1, 1.2, 1.3, 1.4)
# Of layers and of networks.
SETTINGS = {"runs": 5, "batch": 1, "dtype": "float32", "device": "cpu"} | {
    "channels": [4],
    "sides": [8],
    "at_side": 8,
    "at_channels": 4,
    "side": 8,
    "training": False,
}


def results(seconds: dict[str, tuple[float, ...]], **changed: object) -> Results:
    measurements = [Measurement(name, POINT, taken, 100) for name, taken in seconds.items()]
    methods = {
        name: {"label": name.title(), "parameters": 1, "multiply_adds": 1} for name in ("conv", *seconds)
    }
    fields = {"settings": SETTINGS, "environment": {"cpu": "one"}} | changed
    return Results("layers", "", methods=methods, reference="conv", measurements=measurements, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (OLD, ""),
        (tuple(s * 1.05 for s in OLD), ""),
        (tuple(s * 0.95 for s in OLD), ""),
        (tuple(s * 2 for s in OLD), "slower"),
        (tuple(s / 2 for s in OLD), "faster"),
        ((1.2, 1.3, 1.35, 1.6, 9.0), ""),
        ((9.0, 9.0, 1.5, 1.5, 1.5), "slower"),
    ],
)
def test_a_change_is_marked_outside_the_spread_only(new: tuple[float, ...], verdict: str) -> None:
    change = Change(Measurement("a", POINT, OLD), Measurement("a", POINT, new))
    assert change.verdict == verdict


def test_ratio_is_new_by_old() -> None:
    change = Change(Measurement("a", POINT, OLD, 100), Measurement("a", POINT, (2.4,), 50))
    assert change.ratio == pytest.approx(2.0)
    assert change.memory_ratio == 0.5


def test_only_what_both_timed_is_compared() -> None:
    old = results({"conv": OLD, "gone": OLD, "skipped": OLD})
    new = results({"conv": OLD, "skipped": (), "fresh": OLD})
    assert [change.new.method for change in changes(old, new)] == ["conv"]


def compared(tmp_path: Path, old: Results, new: Results, everything: bool = False) -> str:
    old.save(tmp_path / "old.json")
    new.save(tmp_path / "new.json")
    console = Console(file=StringIO(), width=120)
    run_compare(tmp_path / "old.json", tmp_path / "new.json", console, everything=everything)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_printed(tmp_path: Path) -> None:
    old = results({"conv": OLD, "poly": OLD, "gone": OLD})
    new = results({"conv": OLD, "poly": tuple(s / 2 for s in OLD)}, environment={"cpu": "two"})
    text = compared(tmp_path, old, new)
    assert "other environment: cpu: one → two" in text
    assert "0.50×" in text
    assert "faster" in text
    assert "1 of 2 points lie within the spread" in text
    assert "Timed in the first run only: Gone at 1 point" in text
    assert compared(tmp_path, old, new, everything=True).count("Conv") == 2 == text.count("Conv") + 1


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    one = results({"conv": OLD})
    with pytest.raises(SettingsError, match=r"of layers and .* of nets"):
        compared(tmp_path, one, replace(one, kind="nets"))
    with pytest.raises(SettingsError, match="no method timed at the same size"):
        compared(tmp_path, one, results({"poly": OLD}))
