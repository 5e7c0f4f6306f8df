"""`polynl bench compare`: the changes between two benchmarks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from polynl.errors import SettingsError
from polynl.results.benchmark import MEMORY, STEP_TITLES, TIME, Measurement, Results, differences
from polynl.results.formats import if_measured, plural
from polynl.results.tables import Table, as_rich

Verdict = Literal["faster", "slower", ""]


@dataclass(frozen=True)
class Change:
    """One method at one point, before and after."""

    old: Measurement
    new: Measurement

    @property
    def ratio(self) -> float:
        """The new median divided by the old one."""
        ratio = TIME.ratio(self.new, self.old)
        assert ratio is not None
        return ratio

    @property
    def memory_ratio(self) -> float | None:
        """The new peak memory divided by the old one."""
        return MEMORY.ratio(self.new, self.old)

    @property
    def verdict(self) -> Verdict:
        """Set if the change exceeds the spread: the interquartile ranges of the two runs do not overlap."""
        assert self.old.quartiles is not None
        assert self.new.quartiles is not None
        if self.new.quartiles[1] < self.old.quartiles[0]:
            return "faster"
        return "slower" if self.new.quartiles[0] > self.old.quartiles[1] else ""


def changes(old: Results, new: Results) -> list[Change]:
    """Every method and point that both runs timed."""
    before = {(m.method, m.point): m for m in old.measurements if m.seconds}
    pairs = ((before.get((m.method, m.point)), m) for m in new.measurements if m.seconds)
    return [Change(a, b) for a, b in pairs if a is not None]


def run_compare(
    old_path: Path, new_path: Path, console: Console, *, everything: bool = False
) -> list[Change]:
    """Print the differences: environments, each method overall, and the points outside the spread."""
    old, new = Results.load(old_path), Results.load(new_path)
    if old.kind != new.kind:
        raise SettingsError(
            f"{old_path} is a benchmark of {old.kind} and {new_path} of {new.kind}: they cannot be compared."
        )
    for what in ("environment", "settings"):
        for line in differences(getattr(old, what), getattr(new, what)):
            console.print(
                f"other {what}: {line}", style="yellow", soft_wrap=True, highlight=False, markup=False
            )
    found = changes(old, new)
    if not found:
        raise SettingsError("the two runs have no method timed at the same size.")
    console.print(as_rich(_summary(new, found), console.width))
    shown = [change for change in found if everything or change.verdict]
    if shown:
        console.print(as_rich(_details(new, shown), console.width))
    hidden = len(found) - len(shown)
    if hidden:
        console.print(f"{hidden} of {len(found)} points lie within the spread; --all shows them.")
    for name, these, those in (("the first", old, new), ("the second", new, old)):
        only = _timed_only_in(these, those)
        if only:
            console.print(f"Timed in {name} run only: {only}", markup=False)
    return found


def _timed_only_in(these: Results, those: Results) -> str:
    other = {(m.method, m.point) for m in those.measurements if m.seconds}
    found = (m for m in these.measurements if m.seconds and (m.method, m.point) not in other)
    counts = Counter(these.label(m.method) for m in found)
    return ", ".join(f"{label} at {plural(count, 'point')}" for label, count in counts.items())


def _summary(results: Results, found: Sequence[Change]) -> Table:
    groups: dict[tuple[str, str], list[Change]] = {}
    for change in found:
        step = STEP_TITLES[change.new.point.step]
        groups.setdefault((results.label(change.new.method), step), []).append(change)
    rows = []
    for (label, step), group in groups.items():
        verdicts = [change.verdict for change in group]
        mean = math.exp(sum(math.log(change.ratio) for change in group) / len(group))
        counts = len(group), verdicts.count("faster"), verdicts.count("slower")
        rows.append([label, step, f"{mean:.2f}×", *map(str, counts)])
    title = "Time, second run ÷ first run: geometric mean over the points, and how many exceed the spread"
    return Table.flat(title, ["method", "step", "ratio", "points", "faster", "slower"], rows)


def _details(results: Results, shown: Sequence[Change]) -> Table:
    rows = []
    for change in shown:
        where = [results.label(change.new.method), str(change.new.point)]
        times = [TIME.text(change.old), TIME.text(change.new), f"{change.ratio:.2f}×"]
        rows.append([*where, *times, change.verdict, if_measured(change.memory_ratio, "{:.2f}×".format)])
    return Table.flat("Point by point", ["method", "at", "first", "second", "ratio", "", "memory"], rows)
