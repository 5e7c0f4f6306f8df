"""Tables of a run, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from polynl.bench.measure import Step, fitted_exponent
from polynl.results.benchmark import Measurement, Point, Results

STEP_TITLES: dict[Step, str] = {"forward": "forward", "training": "forward + backward"}
NOT_MEASURED = "–"


@dataclass(frozen=True)
class Table:
    """A heading, column headings, and rows of text."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Sweep:
    """The points of a run along one axis, at one step, in rising order."""

    axis: str
    points: Sequence[Point]

    def sizes(self) -> list[int]:
        """Channels, or positions."""
        return [_size(self.axis, point) for point in self.points]


def _size(axis: str, point: Point) -> int:
    return point.side**2 if axis == "positions" else int(point.channels or 0)


def sweep(results: Results, axis: str, step: Step) -> Sweep:
    """The sweep over "channels" or "positions"."""
    s = results.settings
    wanted = {
        "channels": {(s["at_side"], c) for c in s["channels"]},
        "positions": {(side, s["at_channels"]) for side in s["sides"]},
    }[axis]
    points = {
        m.point
        for m in results.measurements
        if m.point.step == step and (m.point.side, m.point.channels) in wanted
    }
    return Sweep(axis, sorted(points, key=lambda point: _size(axis, point)))


def along(results: Results, sweep: Sweep, method: str) -> list[Measurement]:
    """A method's measurements along a sweep."""
    found = (results.at(method, point) for point in sweep.points)
    return [measurement for measurement in found if measurement is not None]


def exponent(results: Results, sweep: Sweep, method: str) -> float | None:
    """k of time ∝ size^k over the top decade that the method reaches."""
    timed = [
        (_size(sweep.axis, m.point), m.median) for m in along(results, sweep, method) if m.median is not None
    ]
    return fitted_exponent([size for size, _ in timed], [seconds for _, seconds in timed])


def layer_tables(results: Results) -> list[Table]:
    """Time against channels, then time and peak memory against positions, for both steps."""
    tables = []
    s = results.settings
    for step in ("forward", "training"):
        over_channels, over_positions = sweep(results, "channels", step), sweep(results, "positions", step)
        at_side, at_width = f"{s['at_side']}×{s['at_side']} positions", f"{s['at_channels']} channels"
        tables += [
            _sweep_table(f"Time, {STEP_TITLES[step]}, at {at_side}", results, over_channels, _time),
            _sweep_table(f"Time, {STEP_TITLES[step]}, at {at_width}", results, over_positions, _time),
            _sweep_table(
                f"Peak memory, {STEP_TITLES[step]}, at {at_width}", results, over_positions, _memory
            ),
        ]
    return tables


Cell = Callable[[Results, Measurement], str]


def _sweep_table(title: str, results: Results, sweep: Sweep, cell: Cell) -> Table:
    symbol = "C" if sweep.axis == "channels" else "N"
    with_time = cell is _time
    headings = [f"{symbol} =", *(f"{size:,}" for size in sweep.sizes())]
    headings += ["spread"] if with_time else []
    headings += [f"{symbol}^k"] if with_time else []
    rows = []
    for method in results.methods:
        found = along(results, sweep, method)
        row = [results.label(method), *(cell(results, measurement) for measurement in found)]
        if with_time:
            spreads = [m.spread for m in found if m.spread is not None]
            k = exponent(results, sweep, method)
            row += [
                f"{max(spreads):.0%}" if spreads else NOT_MEASURED,
                NOT_MEASURED if k is None else f"{k:.2f}",
            ]
        rows.append(row)
    return Table(
        f"{title}: {results.label(results.reference)} in full, the others divided by it", headings, rows
    )


def _time(results: Results, measurement: Measurement) -> str:
    return _cell(measurement, measurement.median, results.ratio(measurement), results, duration)


def _memory(results: Results, measurement: Measurement) -> str:
    return _cell(measurement, measurement.peak_bytes, results.memory_ratio(measurement), results, size_of)


def _cell(
    measurement: Measurement,
    value: float | None,
    ratio: float | None,
    results: Results,
    shown: Callable[[float], str],
) -> str:
    if value is None:
        return NOT_MEASURED
    if measurement.method == results.reference or ratio is None:
        return shown(value)
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "thread"), counted(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them.

    >>> duration(0.0123), duration(2.5), duration(4.2e-5)
    ('12.3 ms', '2.50 s', '42.0 µs')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        value = seconds * factor
        if value >= 1 or unit == "µs":
            break
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def size_of(count: float) -> str:
    """Bytes in a unit that suits them.

    >>> size_of(3 * 2**20), size_of(5 * 2**30), size_of(2048)
    ('3.0 MiB', '5.0 GiB', '2.0 KiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def skipped_lines(results: Results, step: Step | None = None) -> list[str]:
    """What was not measured and why, a line for each method, step and width; of one step if it is named."""
    groups: dict[tuple[str, Step, int | None], list[Measurement]] = {}
    for measurement in results.measurements:
        point = measurement.point
        if measurement.skipped is not None and step in (None, point.step):
            groups.setdefault((measurement.method, point.step, point.channels), []).append(measurement)
    lines = []
    for (method, at_step, channels), found in groups.items():
        first = min(found, key=lambda m: m.point.side)
        where = (
            f"from N = {first.point.side**2:,} on" if len(found) > 1 else f"at N = {first.point.side**2:,}"
        )
        width = "" if channels is None else f", {channels} channels"
        lines.append(
            f"{results.label(method)}, {STEP_TITLES[at_step]}{width}: not measured {where}: {first.skipped}"
        )
    return lines


def as_rich(table: Table) -> RichTable:
    """For the terminal."""
    shown = RichTable(title=table.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, cells in enumerate(zip(table.headings, *table.rows, strict=True)):
        # Short cells stay on one line, so that a narrow terminal wraps the names instead.
        short = max(map(len, cells)) <= 10
        shown.add_column(cells[0], justify="left" if number == 0 else "right", no_wrap=short)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def as_markdown(results: Results, tables: Iterable[Table]) -> str:
    """A page that stands for itself: the command, the machine, the tables, what was not measured."""
    lines = [origin(results.command, results.environment), ""]
    for table in tables:
        lines += [f"**{table.title}**", "", *markdown_rows(table), ""]
    lines += [f"- {line}" for line in skipped_lines(results)]
    return "\n".join(lines).rstrip() + "\n"


def origin(command: str, environment: Mapping[str, Any]) -> str:
    """The command and the machine in one line."""
    e = environment
    cores = f"{counted(e['cores'], 'core')}, {counted(e['threads'], 'thread')}"
    machine = f"{e['cpu']}, {cores}, torch {e['torch']}, polynl {e['polynl']}"
    if "gpu" in e:
        machine = f"{e['gpu']}, {machine}"
    if not e["commit"]:
        return f"`{command}` on {machine}."
    # A plus tells that files had been changed.
    commit = e["commit"][:10] + ("+" if e["commit"].endswith("+") else "")
    return f"`{command}` on {machine}, commit {commit}."


def markdown_rows(table: Table) -> list[str]:
    """The lines of a table in Markdown, without its title."""
    ruler = ["---", *["---:"] * (len(table.headings) - 1)]
    return [_row(table.headings), _row(ruler), *map(_row, table.rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
