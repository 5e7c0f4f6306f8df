"""The charts of results, described once: the page draws them as SVG, matplotlib as files."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from polynl.blocks.registry import BLOCKS, FAMILY_TITLES, GREY, NO_BLOCK, NO_BLOCK_STYLE, Line, Style
from polynl.results.benchmark import AXIS_TITLES, MEMORY, STEP_TITLES, TIME, Axis, Quantity, Results, Step
from polynl.results.block_figures import FIGURES, block_columns
from polynl.results.study import Study, Variant

STYLES = {NO_BLOCK: NO_BLOCK_STYLE} | {name: entry.style for name, entry in BLOCKS.items()}
FAMILIES = {name: FAMILY_TITLES[entry.family] for name, entry in BLOCKS.items()}
OTHER_STYLE, OTHER_FAMILY = Style(GREY, "8", ":"), "Others"
# Variants of one block share its colour; the second has the second line and marker, and so on.
LINES: tuple[Line, ...] = ("-", "--", ":", "-.")
MARKERS = "vs^D"
# The block that this package is about stands out.
EMPHASIS = "poly_nl"
# Of more curves, each family has charts of its own.
MOST_TOGETHER = 8
# Longer lines of a label are broken.
LABEL_LETTERS = 18


@dataclass(frozen=True)
class Series:
    """What a curve is of, and how it looks."""

    label: str
    style: Style
    emphasis: bool = False
    family: str = ""
    """The group it is shown with; what all are compared with has none and is shown with every group."""

    @property
    def lines(self) -> list[str]:
        """The label for a narrow margin: its name, options and place below each other.

        >>> Series("Poly-NL (reduction=4) at res3", STYLES["poly_nl"]).lines
        ['Poly-NL', 'reduction=4', 'at res3']
        """
        parts = re.split(r" \(|, |\)? (?=at )", self.label.removesuffix(")"))
        return [line for part in parts for line in textwrap.wrap(part, LABEL_LETTERS)]


@dataclass(frozen=True)
class Curve:
    """Points from left to right; `ends` are the lower and upper end of a range at each, if there is one."""

    series: Series
    points: Sequence[tuple[float, float]]
    ends: Sequence[tuple[float, float]] = ()
    bars: bool = False
    """Draw the ranges as bars, not as a band."""
    joined: bool = True
    exponent: float | None = None
    """k of time ∝ positions^k."""
    faint: bool = False
    """Of another group: only there for comparison."""


@dataclass(frozen=True)
class Chart:
    """Curves on common axes; `missing`: values of x that were not measured; `level`: a horizontal line."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    log: tuple[bool, bool] = (False, False)
    x_ticks: Sequence[float] = ()
    level: float | None = None
    missing: Sequence[tuple[float, Series]] = ()

    def only(self, shown: Sequence[Series]) -> Chart:
        """The chart with all other curves faint."""
        curves = [replace(curve, faint=curve.series not in shown) for curve in self.curves]
        return replace(self, curves=curves, missing=[place for place in self.missing if place[1] in shown])


@dataclass(frozen=True)
class Figure:
    """Charts of the same series; `legend` lists them."""

    title: str
    charts: Sequence[Chart]
    legend: Sequence[Series]
    notes: Sequence[str] = ()

    def groups(self) -> list[Figure]:
        """The figure itself; with many curves, a figure per family in which those of the others are faint.

        Each group also has the curves without a family and the one that stands out, for comparison.
        """
        found = {series.family for series in self.legend} - {""}
        order = dict.fromkeys([*FAMILY_TITLES.values(), *sorted(found)])
        families = [family for family in order if family in found]
        if len(self.legend) <= MOST_TOGETHER or len(families) < 2:
            return [self]
        groups = []
        for family in families:
            shown = [s for s in self.legend if s.family in ("", family) or s.emphasis]
            groups.append(Figure(family, [chart.only(shown) for chart in self.charts], shown))
        return groups


def training_curves(study: Study) -> Figure:
    """The headline scores and the loss against epochs: the mean over seeds, and their range."""
    computed, headline = study.scores(), study.task_class.headline
    drawn = [(score, computed[score], f"{computed[score]}, %") for score in headline if score in computed]
    charts = []
    for score, name, y_label in (*drawn, ("loss", "training loss", "training loss")):
        curves = []
        for variant, series in _series(study):
            found = variant.history(score)
            points = [(float(epoch), statistics.mean(values)) for epoch, values in found]
            ends = [(min(values), max(values)) for _, values in found]
            curves += [Curve(series, points, ends)] if points else []
        if curves:
            charts.append(Chart(name[0].upper() + name[1:], "epoch", y_label, curves))
    # Where a score is known at one epoch alone, all its points are on top of each other.
    lines = [chart for chart in charts if any(len(curve.points) > 1 for curve in chart.curves)]
    return Figure(study.title, lines or charts, [series for _, series in _series(study)])


def block_charts(study: Study) -> Figure | None:
    """What each block does, against epochs: the share of its branch, α and |β|; mean and range of seeds."""
    charts = []
    rows = [row for variant in study.variants for training in variant.trainings for row in training.rows]
    for figure, (heading, axis) in FIGURES.items():
        columns = block_columns(rows, figure)
        for block, column in columns.items():
            curves = [
                curve for v, series in _series(study) if (curve := _over_epochs(v, series, column, figure))
            ]
            title = heading if len(columns) == 1 else f"{heading}, at {block}"
            if curves:
                log = (False, figure == "share")
                charts.append(Chart(title, "epoch", axis, curves, log=log))
    drawn = {curve.series.label for chart in charts for curve in chart.curves}
    legend = [series for _, series in _series(study) if series.label in drawn]
    return Figure(study.title, charts, legend) if charts else None


def _over_epochs(variant: Variant, series: Series, column: str, figure: str) -> Curve | None:
    """A figure's mean over seeds, and its range; a logarithmic axis has no place for a share of zero."""
    found = [
        (epoch, [abs(value) for value in values] if figure == "beta" else values)
        for epoch, values in variant.history(column)
        if figure != "share" or min(values) > 0
    ]
    points = [(float(epoch), statistics.mean(values)) for epoch, values in found]
    ends = [(min(values), max(values)) for _, values in found]
    return Curve(series, points, ends) if points else None


def accuracy_and_cost(study: Study) -> Figure | None:
    """The best score against the time of both steps: a point per variant, with its 95 % interval.

    Without the outcomes of images, the range over seeds.
    """
    score = study.task_class.best_by
    heading, plain = study.scores().get(score), study.plain()
    if heading is None or plain is None or plain.costs is None or plain.costs.forward_seconds is None:
        return None
    charts = []
    for cost, step in (("forward_seconds", "forward pass"), ("training_seconds", "training step")):
        curves = []
        for variant, series in _series(study):
            values = variant.last(score)
            if values and variant.costs is not None and getattr(variant.costs, cost) is not None:
                x = getattr(variant.costs, cost) / getattr(plain.costs, cost)
                point, ends = (x, statistics.mean(values)), (min(values), max(values))
                if study.evidence is not None and study.evidence.seeds(variant.label):
                    interval = study.evidence.interval(variant.label, score)
                    ends = (interval.low, interval.high)
                curves.append(Curve(series, [point], [ends], bars=True, joined=False))
        x_label = f"time of a {step} ÷ without a block"
        charts.append(Chart(f"{heading} against the {step}", x_label, f"{heading}, %", curves))
    return Figure(study.title, charts, [series for _, series in _series(study)])


def _series(study: Study) -> Iterator[tuple[Variant, Series]]:
    """Every variant with the style of its block, changed if the block came before."""
    seen: dict[str, int] = {}
    for variant in study.variants:
        block = variant.block
        style = STYLES.get(block, OTHER_STYLE)
        again = seen[block] = seen.get(block, -1) + 1
        if again:
            style = Style(style.colour, MARKERS[(again - 1) % len(MARKERS)], LINES[again % len(LINES)])
        family = "" if block == NO_BLOCK else FAMILIES.get(block, OTHER_FAMILY)
        yield variant, Series(variant.label, style, variant.row == EMPHASIS, family)


# In the order of the paper's Figure 2.
PANELS: tuple[tuple[Quantity, Axis], ...] = ((TIME, "channels"), (TIME, "positions"), (MEMORY, "positions"))


def efficiency(
    results: Results, step: Step, looks: Mapping[str, tuple[Style, str]], *, absolute: bool = False
) -> Figure | None:
    """Time and memory of each layer, divided by those of the reference or absolute with quartiles.

    `looks` has the style and the family of each layer.
    """
    legend = {}
    for method in results.methods:
        style, family = looks.get(method, (OTHER_STYLE, OTHER_FAMILY))
        legend[method] = Series(results.label(method), style, method == EMPHASIS, family)
    charts = [_sweep_chart(results, *panel, step, legend, absolute) for panel in PANELS]
    # A chart of files stays in its place even if nothing was measured.
    kept = [chart for chart in charts if absolute or chart.curves]
    title = STEP_TITLES[step].capitalize()
    return Figure(title, kept, list(legend.values()), results.skipped_lines(step)) if kept else None


def _sweep_chart(
    results: Results, quantity: Quantity, axis: Axis, step: Step, legend: Mapping[str, Series], absolute: bool
) -> Chart:
    points = results.sweep(axis, step)
    curves, missing = [], []
    for method, series in legend.items():
        values, ends = [], []
        for m in results.along(points, method):
            x = float(m.point.size(axis))
            value = quantity.value(m) if absolute else results.ratio(m, quantity)
            if value:
                values.append((x, value * quantity.scale if absolute else value))
                if absolute and quantity is TIME and m.quartiles:
                    ends.append((1e3 * m.quartiles[0], 1e3 * m.quartiles[1]))
            elif value is None and m.skipped:
                missing.append((x, series))
        if values:
            growth = quantity is TIME and axis == "positions"
            exponent = results.exponent(method, axis, step) if growth else None
            curves.append(Curve(series, values, ends, bars=True, exponent=exponent))
    return Chart(
        f"{quantity.name.capitalize()} against {axis}, {results.place(axis)}",
        AXIS_TITLES[axis],
        quantity.unit if absolute else f"{quantity.name} ÷ convolution",
        curves,
        log=(True, True),
        x_ticks=[float(point.size(axis)) for point in points],
        level=None if absolute else 1.0,
        missing=missing,
    )
