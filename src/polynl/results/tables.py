"""The tables of results, as text in rows and columns, and their rendering in terminals and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as RichTable

from polynl.blocks.registry import NO_BLOCK
from polynl.results.benchmark import (
    AXIS_TITLES,
    BUSY,
    MEMORY,
    NO_RATIOS,
    STEP_TITLES,
    STEPS,
    THROUGHPUT,
    TIME,
    Axis,
    Measurement,
    Point,
    Quantity,
    Results,
    Step,
)
from polynl.results.formats import (
    NOT_MEASURED,
    duration,
    if_measured,
    large_count,
    mean_and_spread,
    percent,
    plural,
    points,
    ratio,
    signed,
)
from polynl.results.study import Origin, Study, Variant, row_label
from polynl.tasks.base import PaperTable, Task


@dataclass(frozen=True)
class Columns:
    """Columns that belong together, under a common heading if there is one."""

    heading: str
    headings: Sequence[str]


@dataclass(frozen=True)
class Row:
    """A label and the other cells; a faint row is only there for comparison."""

    label: str
    cells: Sequence[str]
    faint: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first column has the rows' labels."""

    title: str
    columns: Sequence[Columns]
    rows: Sequence[Row]
    corner: str = ""
    """Heading of the first column."""
    text: bool = False
    """Whether the cells are words, not numbers to align."""

    @classmethod
    def flat(cls, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
        """A table without common headings; labels and their heading come first."""
        columns = [Columns("", headings[1:])]
        return cls(title, columns, [Row(label, cells) for label, *cells in rows], corner=headings[0])

    def lines(self) -> list[list[str]]:
        """The headings, then the rows, each with the first column."""
        headings = [heading for group in self.columns for heading in group.headings]
        return [[self.corner, *headings], *([row.label, *row.cells] for row in self.rows)]


# Cells of at most this many characters are not wrapped if there is room.
SHORT = 22


def as_rich(table: Table, width: int) -> RichTable:
    """For a terminal with this many columns."""
    shown = RichTable(
        title=table.title and escape(table.title),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    lines = table.lines()
    columns = list(zip(*lines, strict=True))
    longest = [max(map(len, cells)) for cells in columns]
    # Short cells stay on one line, so that a narrow terminal wraps the labels instead. Where even that does
    # not fit, rich would cut digits off, or break words.
    short = [length <= SHORT for length in longest]
    words = [max(len(word) for cell in cells for word in [*cell.split(), ""]) for cells in columns]
    least = [length if fits else word for length, fits, word in zip(longest, short, words, strict=True)]
    if sum(least) + 2 * len(columns) > width:
        short = [False] * len(columns)
    for number, cells in enumerate(columns):
        align: Literal["left", "right"] = "left" if number == 0 else "right"
        shown.add_column(escape(cells[0]), justify=align, no_wrap=short[number], overflow="fold")
    for line in lines[1:]:
        shown.add_row(*map(escape, line))
    return shown


def as_markdown(table: Table) -> str:
    """Without the title."""
    headings, *rows = table.lines()
    ruler = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ruler, *rows))


def benchmark_page(results: Results, tables: Iterable[Table]) -> str:
    """A page of Markdown: the command, the machine, the tables, the notes, and what was not measured."""
    parts = [str(Origin(results.kind, results.command, results.environment))]
    parts += [f"**{table.title}**\n\n{as_markdown(table)}" for table in tables]
    notes = [f"- {line}" for line in (*results.notes(), *results.skipped_lines())]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]) + "\n"


# Accuracy


@dataclass(frozen=True)
class _Part:
    """Columns of the accuracy table, and their cells by the rows' labels."""

    columns: Columns
    cells: Mapping[str, Sequence[str]]

    def row(self, label: str) -> Sequence[str]:
        return self.cells.get(label, [NOT_MEASURED] * len(self.columns.headings))


def accuracy_table(study: Study, *, compact: bool = False) -> Table:
    """The scores of a study; on the paper's data next to the paper's, with faint rows for what was not run.

    A compact table, for terminals, has no gains, the paper's scores in one column, and no faint rows.
    """
    task, labels = study.task_class, {v.label: v.row for v in study.variants}
    absent: dict[str, str] = {}
    if study.paper is not None and not compact:
        absent = {row_label(row): row for row in study.paper.rows if row not in labels.values()}
    here, cost = _our_scores(study, compact=compact), _costs(study, compact=compact)
    paper = (
        [] if study.paper is None else [_paper_scores(task, study.paper, labels | absent, compact=compact)]
    )
    parts = [here, cost, *paper] if compact else [here, *paper, cost]
    rows = [
        Row(label, [cell for part in parts for cell in part.row(label)], faint=label in absent)
        for label in (*labels, *absent)
    ]
    title = study.title if compact else f"{study.title}; gain: in {task.scores[task.best_by]}"
    return Table(title, [part.columns for part in parts], rows)


def _our_scores(study: Study, *, compact: bool) -> _Part:
    best, scores, plain = study.task_class.best_by, study.scores(), study.plain()
    gains = _gains({v.label: v.last(best) for v in study.variants}, None if plain is None else plain.label)
    cells = {v.label: [*(_score_text(study, v, score, compact) for score in scores)] for v in study.variants}
    for v in study.variants:
        certain = None if compact or plain is None else study.difference(v, plain, best)
        cells[v.label].append(gains[v.label] if certain is None else signed(certain))
    shown = slice(len(scores) if compact else None)
    headings = [*scores.values(), "gain"]
    return _Part(Columns("here", headings[shown]), {label: row[shown] for label, row in cells.items()})


def _score_text(study: Study, variant: Variant, score: str, compact: bool) -> str:
    """The mean and the spread; in full, with the interval."""
    text, evidence = mean_and_spread(variant.last(score)), study.evidence
    known = None if compact or evidence is None or score not in evidence.scores() else evidence
    # An unfinished training has a score, but no outcomes.
    if known is None or known.seeds(variant.label) != len(variant.last(score)):
        return text
    evidence = known
    interval = evidence.interval(variant.label, score)
    return f"{text} ({percent(interval.low)} to {percent(interval.high)})"


def _paper_scores(task: type[Task], paper: PaperTable, labels: Mapping[str, str], *, compact: bool) -> _Part:
    """The paper's scores with as many digits as it prints; `labels` are those of the rows."""
    gains = _gains({row: [paper.figures(row)[task.best_by]] for row in paper.rows}, NO_BLOCK)
    cells = {}
    for label, row in labels.items():
        texts = [f"{score:.{paper.digits}f}" for score in paper.rows.get(row, ())]
        if texts:
            cells[label] = [" / ".join(texts)] if compact else [*texts, gains[row]]
    headings = ["paper"] if compact else [*(task.scores[score] for score in paper.scores), "gain"]
    return _Part(Columns(f"the paper: {paper.setting}", headings), cells)


def _gains(values: Mapping[str, Sequence[float]], base: str | None) -> dict[str, str]:
    """How many points each mean is above that of the base."""
    means = {name: statistics.mean(found) for name, found in values.items() if found}
    gains = dict.fromkeys(values, NOT_MEASURED)
    if base in means:
        gains |= {name: points(mean - means[base]) for name, mean in means.items()}
        gains[base] = ""
    return gains


def _costs(study: Study, *, compact: bool) -> _Part:
    """Costs, times being ratios to the network without a block; the training time if none were measured."""
    plain = study.plain()
    base = None if plain is None else plain.costs
    if base is None:
        return _Part(
            Columns("cost", ["training, wall time"]), {v.label: [duration(v.seconds)] for v in study.variants}
        )
    cells = {
        v.label: [
            large_count(v.costs.parameters),
            large_count(v.costs.multiply_adds),
            _slower(v.costs.forward_seconds, base.forward_seconds),
            _slower(v.costs.training_seconds, base.training_seconds),
        ]
        for v in study.variants
        if v.costs is not None
    }
    names = ["params", "MACs", "forward", "step"]
    long = ["parameters", "multiply-adds", "forward", "training step"]
    shown = slice(2 if base.forward_seconds is None else None)
    return _Part(
        Columns("cost", (names if compact else long)[shown]),
        {label: row[shown] for label, row in cells.items()},
    )


def _slower(seconds: float | None, base: float | None) -> str:
    return NOT_MEASURED if seconds is None or base is None else f"{seconds / base:.2f}×"


# Layers


def layer_tables(results: Results) -> list[Table]:
    """Time against channels, then time and peak memory against positions, for both steps; or of shapes."""
    if results.shapes():
        return shape_tables(results)
    wanted: list[tuple[Quantity, Axis]] = [(TIME, "channels"), (TIME, "positions"), (MEMORY, "positions")]
    return [_layer_table(results, quantity, axis, step) for step in STEPS for quantity, axis in wanted]


def shape_tables(results: Results) -> list[Table]:
    """Time and peak memory of maps of every chosen shape, for both steps."""
    points = [Point.of(step, shape) for shape in results.shapes() for step in STEPS]
    return [_shape_table(results, point) for point in points if results.at(results.reference, point)]


def _shape_table(results: Results, point: Point) -> Table:
    """A row per layer: the values, and those divided by the reference's."""
    rows = []
    for method in results.methods:
        m, cells = results.at(method, point), [NOT_MEASURED] * 5
        if m is not None:
            time, memory = ([q.text(m), _divided(results, m, q) or NOT_MEASURED] for q in (TIME, MEMORY))
            cells = [*time, if_measured(m.spread, "{:.0%}".format), *memory]
        rows.append([results.label(method), *cells])
    size = "×".join(map(str, (point.batch, point.channels, *point.spatial)))
    title = f"{STEP_TITLES[point.step].capitalize()}, maps of {size}"
    shown = f"÷: divided by the {results.label(results.reference)}" if results.has_ratios else NO_RATIOS
    headings = ["layer", "median time", "÷", "spread", MEMORY.heading, "÷"]
    return Table.flat(f"{title}; {shown}", headings, rows)


def _divided(results: Results, m: Measurement, quantity: Quantity) -> str:
    """The ratio to the reference, or that the machine was busy; empty if there is neither."""
    if results.has_ratios and results.disturbed(m, quantity):
        return BUSY
    found = results.ratio(m, quantity)
    return "" if found is None else ratio(found)


def _layer_table(results: Results, quantity: Quantity, axis: Axis, step: Step) -> Table:
    symbol, points = AXIS_TITLES[axis][-1], results.sweep(axis, step)
    headings = [f"{symbol} =", *(f"{point.size(axis):,}" for point in points)]
    headings += ["spread", f"{symbol}^k"] if quantity is TIME else []
    rows = []
    for method in results.methods:
        row = [results.label(method)]
        for point in points:
            m = results.at(method, point)
            divided = "" if m is None or method == results.reference else _divided(results, m, quantity)
            row.append(divided or (NOT_MEASURED if m is None else quantity.text(m)))
        if quantity is TIME:
            found = results.along(points, method)
            spread = max((m.spread for m in found if m.spread is not None), default=None)
            exponent = results.exponent(method, axis, step)
            row += [if_measured(spread, "{:.0%}".format), if_measured(exponent, "{:.2f}".format)]
        rows.append(row)
    title = f"{quantity.heading.capitalize()}, {STEP_TITLES[step]}, at {results.place(axis)}"
    shown = f"{results.label(results.reference)} in full, the others divided by it"
    return Table.flat(f"{title}: {shown if results.has_ratios else NO_RATIOS}", headings, rows)


def ratio_table(results: Results, axis: Axis) -> Table:
    """Time, and against positions memory too, divided by that of the reference; for both steps."""
    quantities = {q.heading: q for q in (TIME, MEMORY) if q is TIME or axis == "positions"}
    shown = f"divided by the {results.label(results.reference)}" if results.has_ratios else NO_RATIOS
    title = f"Against {axis}, {results.place(axis)}: {shown}"
    return _sweep_table(
        results, axis, title, quantities, lambda q, m: _divided(results, m, q) or NOT_MEASURED
    )


def absolute_table(results: Results, axis: Axis) -> Table:
    """Median times and peak memory; for both steps."""
    quantities = {"median time": TIME, MEMORY.heading: MEMORY}
    return _sweep_table(results, axis, f"Against {axis}, {results.place(axis)}", quantities, Quantity.text)


def _sweep_table(
    results: Results,
    axis: Axis,
    title: str,
    quantities: Mapping[str, Quantity],
    text: Callable[[Quantity, Measurement], str],
) -> Table:
    """A column per quantity, step and size; for an interrupted run, those that it reached."""
    sweeps = {step: points for step in STEPS if (points := results.sweep(axis, step))}
    columns = [
        Columns(f"{name}, {STEP_TITLES[step]}", [f"{point.size(axis):,}" for point in points])
        for name in quantities
        for step, points in sweeps.items()
    ]
    every = [point for points in sweeps.values() for point in points]
    rows = []
    for method in results.methods:
        found = [results.at(method, point) for point in every]
        cells = [NOT_MEASURED if m is None else text(q, m) for q in quantities.values() for m in found]
        rows.append(Row(results.label(method), cells))
    return Table(title, columns, rows, corner=AXIS_TITLES[axis])


# Networks


def network_table(results: Results) -> Table:
    """The costs of each variant, in brackets divided by those of the plain network if `has_ratios`.

    Parameters and multiply-adds are counted, so they have ratios in any case.
    """
    s, base = results.settings, results.methods[results.reference]
    side, batch = s["side"], s["batch"]
    measured = {
        "latency, 1 image": (Point("forward", 1, side), TIME),
        THROUGHPUT.heading: (Point("forward", batch, side), THROUGHPUT),
        f"memory, {batch} images": (Point("forward", batch, side), MEMORY),
    }
    if s["training"]:
        measured[f"training step, {batch} images"] = (Point("training", batch, side), TIME)
    rows = []
    for method, known in results.methods.items():
        cells = [
            f"{large_count(known[name])} ({known[name] / base[name]:.2f})"
            for name in ("parameters", "multiply_adds")
        ]
        for point, quantity in measured.values():
            m = results.at(method, point)
            text = NOT_MEASURED if m is None else quantity.text(m)
            divided = "" if m is None else _divided(results, m, quantity)
            cells.append(f"{text} ({divided})" if divided else text)
        rows.append([known["label"], *cells])
    size = f"{side}×{side}, {s['dtype']}, median of {plural(s['runs'], 'run')}"
    title = f"{results.label(results.reference)} at {size}; in brackets, divided by the plain network"
    if not results.has_ratios:
        title += f"; times and memory have {NO_RATIOS}"
    return Table.flat(title, ["network", "parameters", "multiply-adds", *measured], rows)


# Environments


# They differ between the trainings of one command, and recipes and tables show them.
PER_RUN = ("seed", "threads")


def environment_table(origins: Sequence[Origin]) -> Table:
    """A column per machine; the commands that ran on it share the column."""
    machines: dict[str, list[Origin]] = {}
    for origin in origins:
        machines.setdefault(repr(_facts(origin)), []).append(origin)
    columns = [", ".join(dict.fromkeys(origin.what for origin in same)) for same in machines.values()]
    facts = [_facts(same[0]) for same in machines.values()]
    names = dict.fromkeys(name for found in facts for name in found)
    rows = [Row(name, [found.get(name, NOT_MEASURED) for found in facts]) for name in names]
    return Table("Machine and software", [Columns("", columns)], rows, text=True)


def _facts(origin: Origin) -> dict[str, str]:
    facts: dict[str, Any] = {k: v for k, v in origin.environment.items() if k not in PER_RUN and v}
    variables = facts.pop("variables", {})
    return {name.replace("_", " "): str(value) for name, value in facts.items()} | variables
