"""The tables of a report, as text in rows and columns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polynl.bench.measure import Step
from polynl.results.benchmark import Measurement, Results
from polynl.results.load import Origin, Study, Variant
from polynl.results.paper import PAPER, row_label
from polynl.results.tables import NOT_MEASURED, STEP_TITLES, Table, duration, size_of, sweep


@dataclass(frozen=True)
class Columns:
    """Columns that belong together, under a heading of their own if they have one."""

    heading: str
    headings: Sequence[str]


@dataclass(frozen=True)
class Row:
    """A label, the other cells, and whether the row is only there to compare with."""

    label: str
    cells: Sequence[str]
    faint: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table: its first column has the rows' labels."""

    caption: str
    columns: Sequence[Columns]
    rows: Sequence[Row]
    corner: str = ""
    """What the headings of the columns are."""
    text: bool = False
    """Whether the cells are words, and no figures to stand below each other."""


def with_spread(values: Sequence[float]) -> str:
    """The mean, and with several values their standard deviation.

    >>> with_spread([70.0]), with_spread([70.0, 72.0])
    ('70.0', '71.0 ± 1.4')
    """
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def accuracy_sheet(study: Study) -> Sheet:
    """A study's scores beside the paper's; what the paper has and the study has not comes faint."""
    paper, scores, costs = PAPER[study.task], study.scores(), _cost_columns(study)
    ours = _gains({v.label: v.last(paper.deciding) for v in study.variants}, _plain(study))
    theirs = _gains({row: [paper.figures(row)[paper.deciding]] for row in paper.rows}, "none")
    run = {variant.row for variant in study.variants}
    rows = [
        Row(
            v.label,
            [*_scored(v, scores), ours[v.label], *_printed(study.task, v.row, theirs), *_costs(v, costs)],
        )
        for v in study.variants
    ]
    for row in (row for row in paper.rows if row not in run):
        absent = [NOT_MEASURED] * (len(scores) + 1)
        cells = [*absent, *_printed(study.task, row, theirs), *[NOT_MEASURED] * len(costs)]
        rows.append(Row(row_label(row), cells, faint=True))
    columns = [
        Columns("here", [*scores.values(), "gain"]),
        Columns(f"the paper: {paper.setting}", [*paper.headings.values(), "gain"]),
    ]
    caption = f"{study.title}; gain: in {paper.headings[paper.deciding]}"
    return Sheet(caption, columns + ([Columns("cost", list(costs))] if costs else []), rows)


def _plain(study: Study) -> str | None:
    """The label of the network without a block, which gains are counted from."""
    return next((variant.label for variant in study.variants if variant.row == "none"), None)


def _gains(values: Mapping[str, Sequence[float]], base: str | None) -> dict[str, str]:
    """What each has more than the base, in points."""
    means = {name: statistics.mean(found) for name, found in values.items() if found}
    if base is None or base not in means:
        return dict.fromkeys(values, NOT_MEASURED)
    shown = {name: f"{mean - means[base]:+.1f}".replace("-", "−") for name, mean in means.items()}
    return dict.fromkeys(values, NOT_MEASURED) | shown | {base: ""}


def _scored(variant: Variant, scores: Mapping[str, str]) -> list[str]:
    return [with_spread(found) if (found := variant.last(score)) else NOT_MEASURED for score in scores]


def _printed(task: str, row: str, gains: Mapping[str, str]) -> list[str]:
    """The paper's figures of a row, with as many digits as it gives."""
    paper = PAPER[task]
    digits = 1 if task == "instance_segmentation" else 2
    figures = paper.figures(row)
    shown = [f"{figures[score]:.{digits}f}" if figures else NOT_MEASURED for score in paper.headings]
    return [*shown, gains.get(row, NOT_MEASURED)]


Cost = Callable[[Variant], str]


def _cost_columns(study: Study) -> dict[str, Cost]:
    """What it takes, with the heading; times are ratios to the network without a block."""
    plain = next((v for v in study.variants if v.row == "none" and v.costs), None)
    if plain is None:
        return {"training": lambda v: time_taken(v.seconds)}

    def ratio(name: str) -> Cost:
        return lambda v: f"{v.costs[name] / plain.costs[name]:.2f}×"

    return {
        "parameters": lambda v: f"{v.costs['parameters'] / 1e3:.1f} k",
        "multiply-adds": lambda v: f"{v.costs['multiply_adds'] / 1e6:.2f} M",
        "forward": ratio("forward_seconds"),
        "training step": ratio("training_seconds"),
    }


def _costs(variant: Variant, columns: Mapping[str, Cost]) -> list[str]:
    return [shown(variant) for shown in columns.values()]


def time_taken(seconds: float) -> str:
    """In the unit that people would say it in.

    >>> time_taken(2.51), time_taken(95), time_taken(5400)
    ('2.5 s', '1.6 min', '1.5 h')
    """
    for limit, unit in ((3600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.1f} s"


Figure = Callable[[Results, Measurement], str]


def ratio_sheet(results: Results, axis: str) -> Sheet:
    """Time, and against positions memory too, divided by the reference's; for both steps."""
    kinds: dict[str, Figure] = {"time": lambda r, m: _ratio(r.ratio(m))}
    if axis == "positions":
        kinds["peak memory"] = lambda r, m: _ratio(r.memory_ratio(m))
    caption = f"{_where(results, axis)}: divided by the {results.label(results.reference)}"
    return _sweep_sheet(results, axis, caption, kinds)


def absolute_sheet(results: Results, axis: str) -> Sheet:
    """The medians themselves, and the peaks."""
    kinds: dict[str, Figure] = {
        "median time": lambda _, m: _shown(m.median, duration),
        "peak memory": lambda _, m: _shown(m.peak_bytes, size_of),
    }
    return _sweep_sheet(results, axis, _where(results, axis), kinds)


def _sweep_sheet(results: Results, axis: str, caption: str, kinds: Mapping[str, Figure]) -> Sheet:
    """A column for each kind, step and size; of an interrupted run those that it came to."""
    steps: tuple[Step, ...] = ("forward", "training")
    sweeps = {step: found for step in steps if (found := sweep(results, axis, step)).points}
    columns = [
        Columns(f"{kind}, {STEP_TITLES[step]}", [f"{size:,}" for size in along_axis.sizes()])
        for kind in kinds
        for step, along_axis in sweeps.items()
    ]
    rows = []
    for method in results.methods:
        cells = []
        for figure in kinds.values():
            for point in (point for along_axis in sweeps.values() for point in along_axis.points):
                measured = results.at(method, point)
                cells.append(NOT_MEASURED if measured is None else figure(results, measured))
        rows.append(Row(results.label(method), cells))
    return Sheet(caption, columns, rows, corner="positions N" if axis == "positions" else "channels C")


def _where(results: Results, axis: str) -> str:
    s = results.settings
    if axis == "positions":
        return f"Against positions, {s['at_channels']} channels"
    return f"Against channels, {s['at_side']}×{s['at_side']} positions"


def _ratio(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _shown(value: float | None, unit: Callable[[float], str]) -> str:
    return NOT_MEASURED if value is None else unit(value)


def plain_sheet(name: str, table: Table) -> Sheet:
    """A table of `polynl bench` as it is, under the name of where it comes from."""
    return Sheet(
        f"{name}: {table.title}" if name else table.title,
        [Columns("", list(table.headings[1:]))],
        [Row(row[0], list(row[1:])) for row in table.rows],
    )


def environment_sheet(origins: Sequence[Origin]) -> Sheet:
    """A column for each machine that results come from; several commands on one share it."""
    machines: dict[str, list[Origin]] = {}
    for origin in origins:
        machines.setdefault(repr(_facts(origin)), []).append(origin)
    columns = [", ".join(dict.fromkeys(origin.what for origin in same)) for same in machines.values()]
    facts = [_facts(same[0]) for same in machines.values()]
    names = dict.fromkeys(name for found in facts for name in found)
    rows = [Row(name, [found.get(name, NOT_MEASURED) for found in facts]) for name in names]
    return Sheet("Machine and software", [Columns("", columns)], rows, text=True)


# They differ between the trainings of one start, and are in the recipes and tables.
_OF_ONE_RUN = ("seed", "threads")


def _facts(origin: Origin) -> dict[str, str]:
    facts = {name: value for name, value in origin.environment.items() if name not in _OF_ONE_RUN and value}
    variables = facts.pop("variables", {})
    return {name.replace("_", " "): str(value) for name, value in facts.items()} | variables
