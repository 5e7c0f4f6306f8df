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
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from polynl.bench.cases import STYLES
from polynl.blocks.registry import Style
from polynl.files import write_atomically
from polynl.results import charts
from polynl.results.benchmark import STEP_TITLES, STEPS, Results, Step
from polynl.results.formats import plural

LEGEND_COLUMNS = 4
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
    described = charts.efficiency(results, step, STYLES, absolute=True)
    assert described is not None, "absolute panels are there even if empty"
    device = e.get("gpu", f"{e['cpu']}, {plural(e['threads'], 'thread')}")
    what = f"One layer, {STEP_TITLES[step]}, batch {s['batch']}, {s['dtype']}"
    return drawn(described, f"{what}: median of {plural(s['runs'], 'run')} on {device}")


def drawn(described: charts.Figure, title: str) -> Figure:
    """The charts side by side, with the legend and the notes below them."""
    notes, count = described.notes, len(described.charts)
    # In inches, from the bottom up: the notes, the legend, the panels with their labels and titles.
    legend_from = 0.1 + (0.25 * (len(notes) + 1) if notes else 0)
    growth = any(series.exponent is not None for series in described.legend)
    rows = -(-len(described.legend) // LEGEND_COLUMNS)
    panels_from = legend_from + 0.32 * rows + (1.35 if growth else 0.8)
    height, width = panels_from + 4.6 + 0.85, 5 * max(count, 2)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height))
        panels = figure.subplots(1, max(count, 1), squeeze=False)[0]
        for letter, ax, chart in zip(ascii_lowercase, panels, described.charts, strict=False):
            _draw_chart(ax, chart, f"({letter}) {chart.title}")
        figure.suptitle(title)
        edges = 0.82 / width, 1 - 0.22 / width
        figure.subplots_adjust(edges[0], panels_from / height, edges[1], 1 - 0.85 / height, wspace=0.22)
        _draw_legend(figure, described.legend, GROWTH if growth else None, legend_from / height)
        if notes:
            text = "\n".join(["× at the upper edge: not measured", *notes])
            figure.text(edges[0], 0.12 / height, text, fontsize=10, va="bottom", linespacing=1.5)
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
    ax.set_xlabel(chart.x_label)
    ax.set_ylabel(chart.y_label)
    ax.margins(y=0.18)
    ax.grid(alpha=0.3)


def _draw_curve(ax: Axes, curve: charts.Curve) -> None:
    series, xs = curve.series, [x for x, _ in curve.points]
    colour = series.style.colour
    ax.plot(
        xs,
        [y for _, y in curve.points],
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


def _draw_missing(ax: Axes, missing: Sequence[tuple[float, Style]]) -> None:
    """A cross at the upper edge for every missing point, those of one size below each other."""
    for place, (x, style) in enumerate(missing):
        above = sum(other == x for other, _ in missing[:place])
        at = ax.get_xaxis_transform()
        ax.plot(x, 0.98 - 0.03 * above, "x", color=style.colour, transform=at, markersize=8)


def _draw_legend(figure: Figure, legend: Sequence[charts.Series], title: str | None, bottom: float) -> None:
    handles: list[Any] = []
    for series in legend:
        (colour, marker, line), k = series.style, series.exponent
        label = series.label if k is None else f"{series.label}  $N^{{{k:.2f}}}$"
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle=line, markersize=8, label=label))
    place: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, bottom), "ncols": LEGEND_COLUMNS}
    figure.legend(title=title, handles=handles, frameon=False, **place)
