"""Which charts a report has: training curves, accuracy against cost, and what layers cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from polynl.bench.measure import Step
from polynl.bench.plots import BLACK, OTHER, STYLES, Line, Style
from polynl.report.chart import Chart, Curve, svg, swatch
from polynl.results.benchmark import Measurement, Results
from polynl.results.load import Study, Variant
from polynl.results.paper import PAPER
from polynl.results.tables import STEP_TITLES, along, skipped_lines, sweep

PLAIN = Style(BLACK, "o")
# Variants of one block share its colour: the second of them has the second line and marker, and so on.
LINES: tuple[Line, ...] = ("-", "--", ":", "-.")
MARKERS = "vs^D"
EMPHASIS = "poly_nl"


@dataclass(frozen=True)
class Figure:
    """Charts that share a legend."""

    title: str
    charts: Sequence[tuple[str, Markup]]
    """(title, SVG)."""
    legend: Sequence[tuple[Markup, str]]
    """(swatch, label)."""
    notes: Sequence[str] = ()


def curves(study: Study) -> Figure:
    """The deciding scores and the loss along the epochs, the mean over seeds and their range."""
    drawn = {score: f"{heading}, %" for score, heading in study.scores().items() if _headline(study, score)}
    charts = []
    for score, y_label in {**drawn, "loss": "loss in training"}.items():
        found = [_curve(v, score, style) for v, style in _styled(study)]
        lines = [line for line in found if line.points]
        if lines:
            title = y_label[0].upper() + y_label[1:].removesuffix(", %")
            charts.append((title, svg(Chart(title, "epoch", y_label, lines))))
    return Figure(study.title, charts, _legend(study))


def _headline(study: Study, score: str) -> bool:
    """Of detectors only the main scores: six charts would say the same."""
    return study.task != "instance_segmentation" or score in ("box_ap", "mask_ap")


def _curve(variant: Variant, score: str, style: Style) -> Curve:
    found = variant.along_epochs(score)
    points = [(float(epoch), statistics.mean(values)) for epoch, values in found]
    ends = [(min(values), max(values)) for _, values in found]
    return Curve(variant.label, style, points, ends, emphasis=variant.row == EMPHASIS)


def against_cost(study: Study) -> Figure | None:
    """A point for each block whose cost was measured, its seeds as a line."""
    deciding = PAPER[study.task].deciding
    plain = next((v for v in study.variants if v.row == "none" and v.costs), None)
    heading = study.scores().get(deciding)
    if plain is None or heading is None:
        return None
    charts = []
    for name, said in (("forward_seconds", "forward pass"), ("training_seconds", "training step")):
        lines = []
        for v, style in _styled(study):
            values = v.last(deciding)
            if not values:
                continue
            point = (v.costs[name] / plain.costs[name], statistics.mean(values))
            ends, emphasis = [(min(values), max(values))], v.row == EMPHASIS
            lines.append(Curve(v.label, style, [point], ends, emphasis=emphasis, joined=False))
        x_label = f"time of a {said} ÷ without a block"
        charts.append((f"{heading} against the {said}", svg(Chart(said, x_label, f"{heading}, %", lines))))
    return Figure(study.title, charts, _legend(study))


def _legend(study: Study) -> list[tuple[Markup, str]]:
    return [(swatch(style, emphasis=v.row == EMPHASIS), v.label) for v, style in _styled(study)]


def _styled(study: Study) -> Iterator[tuple[Variant, Style]]:
    """Every variant with the style of its block, changed where the block was there before."""
    seen: dict[str, int] = {}
    for variant in study.variants:
        base = PLAIN if variant.block == "none" else STYLES.get(variant.block, OTHER)
        again = seen[variant.block] = seen.get(variant.block, -1) + 1
        if again:
            base = Style(base.colour, MARKERS[(again - 1) % len(MARKERS)], LINES[again % len(LINES)])
        yield variant, base


@dataclass(frozen=True)
class _Panel:
    axis: str
    title: str
    y_label: str
    value: Callable[[Results, Measurement], float | None]
    level: float | None = 1.0


PANELS = (
    _Panel("positions", "Time against positions", "time ÷ convolution", Results.ratio),
    _Panel("channels", "Time against channels", "time ÷ convolution", Results.ratio),
    _Panel("positions", "Memory against positions", "memory ÷ convolution", Results.memory_ratio),
)


def efficiency(results: Results, step: Step) -> Figure | None:
    """Time and memory of each layer, divided by those of the 1×1 convolution."""
    drawn = [(_title(results, panel), chart) for panel in PANELS if (chart := _panel(results, panel, step))]
    if not drawn:
        return None
    legend = [
        (swatch(STYLES.get(method, OTHER), emphasis=method == EMPHASIS), results.label(method))
        for method in results.methods
    ]
    title = STEP_TITLES[step].capitalize()
    return Figure(title, [(name, svg(chart)) for name, chart in drawn], legend, skipped_lines(results, step))


def _title(results: Results, panel: _Panel) -> str:
    s = results.settings
    where = (
        f"{s['at_channels']} channels"
        if panel.axis == "positions"
        else f"{s['at_side']}×{s['at_side']} positions"
    )
    return f"{panel.title}, {where}"


def _panel(results: Results, panel: _Panel, step: Step) -> Chart | None:
    points = sweep(results, panel.axis, step)
    sizes = dict(zip(points.points, points.sizes(), strict=True))
    lines, missing = [], []
    for method in results.methods:
        style = STYLES.get(method, OTHER)
        found = [(m, panel.value(results, m)) for m in along(results, points, method)]
        values = [(float(sizes[m.point]), value) for m, value in found if value]
        missing += [(float(sizes[m.point]), style) for m, value in found if value is None and m.skipped]
        if values:
            lines.append(Curve(results.label(method), style, values, emphasis=method == EMPHASIS))
    if not lines:
        return None
    label = "positions N" if panel.axis == "positions" else "channels C"
    ticks = [float(size) for size in points.sizes()]
    return Chart(panel.title, label, panel.y_label, lines, (True, True), ticks, panel.level, missing)
