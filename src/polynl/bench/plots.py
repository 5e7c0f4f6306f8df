"""Figures as PNG and SVG files, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from polynl.bench.cases import LOOKS
from polynl.files import write_atomically
from polynl.results import charts
from polynl.results.benchmark import STEP_TITLES, STEPS, Results, Step
from polynl.results.formats import plural
from polynl.results.label_places import spread

# In inches: a chart with its margins, the margin for labels, a line of a label; the height of a single row of
# charts, of each of several, of what is between two rows, and of the name of the horizontal axis.
PANEL_WIDTH, LABELS_WIDTH, LABEL_LINE = 5.9, 1.75, 0.17
PANEL_HEIGHT, ROW_HEIGHT, BETWEEN_ROWS, X_LABEL = 4.6, 3.5, 0.95, 0.95
FAINT = "#d9d9d9"
GROWTH = "$N^k$: how time grows with the positions, over the top decade measured"
RC: dict[Any, Any] = {"font.size": 12, "axes.labelsize": 12, "svg.hashsalt": "polynl", "svg.fonttype": "path"}


def save_layer_figures(results: Results, folder: Path) -> list[Path]:
    """A figure per step, as PNG and as SVG; returns the paths."""
    return [
        path for step in STEPS for path in save(layer_figure(results, step), folder / f"layers-{step}", "svg")
    ]


def save(figure: Figure, path: Path, *suffixes: str) -> list[Path]:
    """Write the figure as PNG and as the other kinds; returns the paths."""
    paths = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", *suffixes)]
    with matplotlib.rc_context(RC):
        for file in paths:
            # Without its date an SVG of the same results is the same file.
            metadata = {"Date": None} if file.suffix == ".svg" else None
            content = io.BytesIO()
            figure.savefig(content, format=file.suffix[1:], dpi=150, metadata=metadata)
            write_atomically(file, content.getbuffer())
    return paths


def layer_figure(results: Results, step: Step) -> Figure:
    """The three panels of the paper's Figure 2."""
    s, e = results.settings, results.environment
    described = charts.efficiency(results, step, LOOKS, absolute=True)
    assert described is not None, "absolute panels are there even if empty"
    device = e.get("gpu", f"{e['cpu']}, {plural(e['threads'], 'thread')}")
    what = f"One layer, {STEP_TITLES[step]}, batch {s['batch']}, {s['dtype']}"
    return drawn(described, f"{what}: median of {plural(s['runs'], 'run')} on {device}")


def drawn(described: charts.Figure, title: str) -> Figure:
    """The charts side by side, with a row per group and the notes below them.

    Curves are labelled at their ends, in the margin to the right of each chart.
    """
    groups, columns = described.groups(), max(len(described.charts), 1)
    notes = (
        [GROWTH] if any(c.exponent is not None for chart in described.charts for c in chart.curves) else []
    )
    notes += ["× at the upper edge: not measured", *described.notes] if described.notes else []
    # In inches: the notes at the bottom, the rows with their titles and labels, the title.
    tall = PANEL_HEIGHT if len(groups) == 1 else ROW_HEIGHT
    below, above = 0.3 + 0.25 * len(notes) + X_LABEL, 1.0 if len(groups) == 1 else 1.25
    height = below + tall * len(groups) + BETWEEN_ROWS * (len(groups) - 1) + above
    width = PANEL_WIDTH * columns
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height))
        panels = figure.subplots(len(groups), columns, squeeze=False)
        edges = 0.82 / width, 1 - LABELS_WIDTH / width, below / height, 1 - above / height
        between = (0.82 + LABELS_WIDTH) / (PANEL_WIDTH - 0.82 - LABELS_WIDTH), BETWEEN_ROWS / tall
        figure.subplots_adjust(edges[0], edges[2], edges[1], edges[3], *between)
        for row, (axes, group) in enumerate(zip(panels, groups, strict=True)):
            for letter, ax, chart in zip(ascii_lowercase, axes, group.charts, strict=False):
                _draw_chart(ax, chart, f"({letter}) {chart.title}" if row == 0 else "")
                ax.set_xlabel(chart.x_label if row == len(groups) - 1 else "")
            if len(groups) > 1:
                at = axes[0].get_position().y1 + (0.42 if row == 0 else 0.1) / height
                figure.text(0.12 / width, at, group.title, fontsize=13, fontweight="bold", va="bottom")
        figure.suptitle(title, y=1 - 0.15 / height, va="top")
        figure.text(0.12 / width, 0.12 / height, "\n".join(notes), fontsize=10, va="bottom", linespacing=1.5)
    return figure


def _draw_chart(ax: Axes, chart: charts.Chart, title: str) -> None:
    for curve in chart.curves:
        _draw_curve(ax, curve)
    _draw_missing(ax, chart.missing)
    if chart.log[0]:
        ax.set_xscale("log")
    # A logarithmic axis without a single value cannot be drawn.
    if not chart.curves:
        ax.set_yticks([])
    elif chart.log[1]:
        ax.set_yscale("log")
    if chart.x_ticks:
        ax.xaxis.set_major_locator(FixedLocator(list(chart.x_ticks)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.tick_params(axis="x", labelrotation=35)
    elif all(x == int(x) for curve in chart.curves for x, _ in curve.points):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(title, fontsize=12)
    ax.set_ylabel(chart.y_label)
    ax.margins(y=0.18)
    ax.grid(alpha=0.3)
    _draw_labels(ax, [curve for curve in chart.curves if not curve.faint])


def _draw_curve(ax: Axes, curve: charts.Curve) -> None:
    series, xs, ys = curve.series, [x for x, _ in curve.points], [y for _, y in curve.points]
    if curve.faint:
        marker = "" if curve.joined else "o"
        ax.plot(xs, ys, color=FAINT, marker=marker, markersize=4, linewidth=1, zorder=1)
        return
    colour = series.style.colour
    ax.plot(
        xs,
        ys,
        marker=series.style.marker,
        color=colour,
        linestyle=series.style.line if curve.joined else "",
        markersize=13 if series.emphasis else 7,
        linewidth=2.6 if series.emphasis else 1.5,
        zorder=3 if series.emphasis else 2,
    )
    if curve.bars:
        for x, ends in zip(xs, curve.ends, strict=False):
            ax.plot([x, x], ends, color=colour, linewidth=1)
    else:
        low, high = ([ends[k] for ends in curve.ends] for k in (0, 1))
        ax.fill_between(xs, low, high, color=colour, alpha=0.15)


def _draw_missing(ax: Axes, missing: Sequence[tuple[float, charts.Series]]) -> None:
    """A cross at the upper edge for every missing point, those of one size below each other."""
    for place, (x, series) in enumerate(missing):
        above = sum(other == x for other, _ in missing[:place])
        at = ax.get_xaxis_transform()
        ax.plot(x, 0.98 - 0.03 * above, "x", color=series.style.colour, transform=at, markersize=8)


def _draw_labels(ax: Axes, curves: Sequence[charts.Curve]) -> None:
    """The labels in the right margin, each with its marker and a thin line to the end of its curve."""
    # Nothing may rescale the axes from here on: the ends of the curves would move.
    ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
    texts = [_label(curve) for curve in curves]
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = [tuple(to_axes.transform(curve.points[-1])) for curve in curves]
    inches = ax.bbox.height / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    heights = [LABEL_LINE * (1 + text.count("\n")) / inches for text in texts]
    places = spread([y for _, y in ends], heights, -0.04, 1.04)
    for curve, text, (x, y), place in zip(curves, texts, ends, places, strict=True):
        series, to = curve.series, ax.transAxes
        style = series.style
        outside: Any = {"transform": to, "clip_on": False, "color": style.colour}
        ax.plot([x, 1.045], [y, place], linewidth=0.6, alpha=0.6, zorder=1, **outside)
        ax.plot(1.045, place, marker=style.marker, markersize=10 if series.emphasis else 6, **outside)
        weight = "bold" if series.emphasis else "normal"
        ax.text(1.07, place, text, transform=to, fontsize=10, fontweight=weight, va="center", linespacing=1.0)


def _label(curve: charts.Curve) -> str:
    """The lines of a curve's label, with how it grows in the first."""
    growth = "" if curve.exponent is None else f" $N^{{{curve.exponent:.2f}}}$"
    name, *others = curve.series.lines
    return "\n".join([name + growth, *others])
