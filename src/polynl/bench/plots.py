"""The figures of a run, in the layout of the paper's Figure 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from polynl.bench.measure import Step
from polynl.results.benchmark import Measurement, Results
from polynl.results.tables import STEP_TITLES, Sweep, along, counted, exponent, skipped_lines, sweep

Line = Literal["-", "--", "-.", ":"]


class Style(NamedTuple):
    """How a method is drawn; members of a family share the colour and differ in marker and line."""

    colour: str
    marker: str
    line: Line = "-"


# Okabe and Ito's colours, which colour-blind readers tell apart; yellow is too pale for lines on white.
BLACK, GREY, ORANGE, SKY = "#000000", "#8c8c8c", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILLION, PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"
STYLES = {
    "conv1x1": Style(BLACK, "o"),
    "conv3x3": Style(BLACK, "s", "--"),
    "poly_nl": Style(VERMILLION, "*"),
    "poly_nl_direct": Style(VERMILLION, "P", "--"),
    "non_local": Style(BLUE, "^"),
    "non_local_gram": Style(BLUE, "v", "--"),
    "non_local_softmax": Style(SKY, ">"),
    "efficient_nl": Style(GREEN, "D"),
    "latent_gnn": Style(ORANGE, "X"),
    "tesa": Style(PURPLE, "h", "--"),
    "tesa_quadratic": Style(PURPLE, "p"),
    "polynomial": Style(GREY, "d", "-."),
    "mmcv_dot_product": Style(BLUE, "1", ":"),
    "mmcv_softmax": Style(SKY, "2", ":"),
    "timm": Style(GREEN, "3", ":"),
}
OTHER = Style(GREY, "8", ":")
COLUMNS = 4  # of the legend
RC: dict[Any, Any] = {"font.size": 12, "axes.labelsize": 12, "svg.hashsalt": "polynl", "svg.fonttype": "path"}


class Panel(NamedTuple):
    """One of the three: what is on its axes, and the scale and error of a point."""

    title: str
    axis: str
    y_label: str
    value: Callable[[Measurement], float | None]
    quartiles: Callable[[Measurement], tuple[float, float] | None]


def _milliseconds(measurement: Measurement) -> float | None:
    return None if measurement.median is None else measurement.median * 1e3


def _quartiles(measurement: Measurement) -> tuple[float, float] | None:
    ends = measurement.quartiles
    return None if ends is None else (ends[0] * 1e3, ends[1] * 1e3)


def _mebibytes(measurement: Measurement) -> float | None:
    return None if measurement.peak_bytes is None else measurement.peak_bytes / 2**20


PANELS = (
    Panel("(a) time against channels", "channels", "ms", _milliseconds, _quartiles),
    Panel("(b) time against positions", "positions", "ms", _milliseconds, _quartiles),
    Panel("(c) peak memory against positions", "positions", "MiB", _mebibytes, lambda _: None),
)


def save_layer_figures(results: Results, folder: Path) -> list[Path]:
    """A figure for each step, as PNG and as SVG; the paths written."""
    paths = []
    steps: tuple[Step, ...] = ("forward", "training")
    with matplotlib.rc_context(RC):
        for step in steps:
            figure = layer_figure(results, step)
            for suffix in ("png", "svg"):
                path = folder / f"layers-{step}.{suffix}"
                # Without its date an SVG of the same results is the same file.
                figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
                paths.append(path)
    return paths


def layer_figure(results: Results, step: Step) -> Figure:
    """Three panels side by side, the legend and what was not measured below them."""
    s, e = results.settings, results.environment
    notes = skipped_lines(results, step)
    # In inches, from the bottom up: the notes, the legend, the panels with their labels and titles.
    legend_from = 0.1 + (0.25 * (len(notes) + 1) if notes else 0)
    panels_from = legend_from + 0.32 * -(-len(results.methods) // COLUMNS) + 1.35
    height = panels_from + 4.6 + 0.85
    figure = Figure(figsize=(15, height))
    axes = figure.subplots(1, 3)
    where = {
        "channels": f"{s['at_side']}×{s['at_side']} positions",
        "positions": f"{s['at_channels']} channels",
    }
    for ax, panel in zip(axes, PANELS, strict=True):
        along_axis = sweep(results, panel.axis, step)
        drawn = [_draw_line(ax, panel, results, along_axis, method) for method in results.methods]
        _mark_skipped(ax, panel, results, along_axis)
        _finish(ax, panel, along_axis, where[panel.axis], any(drawn))
    device = e.get("gpu", f"{e['cpu']}, {counted(e['threads'], 'thread')}")
    what = f"One layer, {STEP_TITLES[step]}, batch {s['batch']}, {s['dtype']}"
    figure.suptitle(f"{what}: median of {counted(s['runs'], 'run')} on {device}")
    figure.subplots_adjust(0.055, panels_from / height, 0.985, 1 - 0.85 / height, wspace=0.2)
    _legend(figure, results, sweep(results, "positions", step), bottom=legend_from / height)
    if notes:
        text = "\n".join(["× at the upper edge: not measured", *notes])
        figure.text(0.055, 0.12 / height, text, fontsize=10, va="bottom", linespacing=1.5)
    return figure


def _draw_line(ax: Axes, panel: Panel, results: Results, sweep: Sweep, method: str) -> bool:
    style = STYLES.get(method, OTHER)
    found = along(results, sweep, method)
    drawn = [(_x(panel, m), panel.value(m), panel.quartiles(m)) for m in found if panel.value(m) is not None]
    xs, ys = [x for x, _, _ in drawn], [y for _, y, _ in drawn]
    emphasis = method == "poly_nl"
    ax.plot(
        xs,
        ys,  # type: ignore[arg-type]
        color=style.colour,
        marker=style.marker,
        linestyle=style.line,
        markersize=13 if emphasis else 7,
        linewidth=2.6 if emphasis else 1.5,
        zorder=3 if emphasis else 2,
    )
    for x, _, ends in drawn:
        if ends is not None:
            ax.plot([x, x], ends, color=style.colour, linewidth=1)
    return bool(drawn)


def _mark_skipped(ax: Axes, panel: Panel, results: Results, sweep: Sweep) -> None:
    """A cross at the upper edge for every missing point, those of one size below each other."""
    for point in sweep.points:
        here = [m for m in results.measurements if m.point == point and m.skipped and panel.value(m) is None]
        for number, m in enumerate(here):
            at, colour = (_x(panel, m), 0.98 - 0.03 * number), STYLES.get(m.method, OTHER).colour
            ax.plot(*at, "x", color=colour, transform=ax.get_xaxis_transform(), markersize=8)


def _x(panel: Panel, measurement: Measurement) -> int:
    point = measurement.point
    return point.side**2 if panel.axis == "positions" else int(point.channels or 0)


def _finish(ax: Axes, panel: Panel, sweep: Sweep, where: str, drawn: bool) -> None:
    ax.set_xscale("log")
    # A logarithmic axis without a single value cannot be drawn.
    if drawn:
        ax.set_yscale("log")
    else:
        ax.set_yticks([])
    ax.set_title(f"{panel.title}, {where}", fontsize=12)
    ax.set_xlabel("channels C" if panel.axis == "channels" else "positions N")
    ax.set_ylabel(panel.y_label)
    ax.xaxis.set_major_locator(FixedLocator([float(size) for size in sweep.sizes()]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", labelrotation=35)
    ax.margins(y=0.18)
    ax.grid(alpha=0.3)


def _legend(figure: Figure, results: Results, positions: Sweep, bottom: float) -> None:
    handles: list[Any] = []
    for method in results.methods:
        style, k = STYLES.get(method, OTHER), exponent(results, positions, method)
        growth = "" if k is None else f"  $N^{{{k:.2f}}}$"
        handles.append(
            Line2D(
                [],
                [],
                color=style.colour,
                marker=style.marker,
                linestyle=style.line,
                markersize=8,
                label=results.label(method) + growth,
            )
        )
    title = "$N^k$: how time grows with the positions, over the top decade measured"
    figure.legend(
        title=title,
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, bottom),
        ncols=COLUMNS,
        frameon=False,
    )
