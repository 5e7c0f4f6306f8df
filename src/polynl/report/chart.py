"""Charts as SVG for the page: with tooltips, and in the page's colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from polynl.blocks.registry import BLACK, Style
from polynl.results.charts import Chart, Curve, Series
from polynl.results.formats import number
from polynl.results.label_places import spread

# In units of about one pixel on a phone, so that the text is legible there.
WIDTH, HEIGHT = 360, 280
TOP, BOTTOM = 22, 230
# Width of a digit and of a letter in common fonts, height of a line of text, and of one in a label.
DIGIT, LETTER, LINE, LABEL_LINE = 7.4, 6.6, 18, 14
# From the axes to the marker of a label, and to its text.
TO_MARKER, TO_TEXT = 12, 22
DASHES = {"-": "none", "--": "6 4", "-.": "7 3 2 3", ":": "2 3"}
# Number of corners on a circle, and the angle of the first one from the top.
POLYGONS = {
    "s": (4, 45),
    "D": (4, 0),
    "d": (4, 0),
    "^": (3, 0),
    "v": (3, 60),
    ">": (3, 30),
    "h": (6, 0),
    "p": (5, 0),
}
CROSSES = {"X": 45, "P": 0, "1": 0, "2": 0, "3": 45}


@dataclass(frozen=True)
class Axis:
    """A scale from values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """The coordinate of a value."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool) -> Axis:
        """An axis with a margin around the values; it goes below zero only if a value does."""
        low, high = min(values), max(values)
        if log:
            margin = (high / low) ** 0.06 if high > low else 2.0
            return cls(low / margin, high * margin, start, end, log)
        margin = (high - low) * 0.06 if high > low else abs(high) * 0.1 or 1.0
        bottom = low - margin if low < 0 else max(low - margin, 0.0)
        return cls(bottom, high + margin, start, end, log)


def svg(chart: Chart) -> Markup:
    """The chart, with a title for screen readers."""
    xs = [x for curve in chart.curves for x, _ in curve.points] + [x for x, _ in chart.missing]
    xs += chart.x_ticks
    ys = [y for curve in chart.curves for _, y in curve.points]
    ys += [end for curve in chart.curves for ends in curve.ends for end in ends]
    ys += [] if chart.level is None else [chart.level]
    y = Axis.over(ys, BOTTOM, TOP, log=chart.log[1])
    y_ticks = _labelled(_ticks(y), y)
    # The axis label stands to the left of the longest tick label.
    left = 26 + DIGIT * max((len(text) for _, text in y_ticks), default=0)
    labelled = [curve for curve in chart.curves if not curve.faint]
    letters = max((len(line) for curve in labelled for line in curve.series.lines), default=0)
    x = Axis.over(xs, left, WIDTH - TO_TEXT - LETTER * letters, log=chart.log[0])
    whole = all(value == int(value) for value in xs)
    x_ticks = _labelled(chart.x_ticks or _ticks(x, whole=whole), x)
    parts = [_grid(chart, x, y, x_ticks, y_ticks)]
    order = sorted(chart.curves, key=lambda curve: (not curve.faint, curve.series.emphasis))
    parts += [_faint(curve, x, y) if curve.faint else _curve(curve, x, y) for curve in order]
    parts += _labels(labelled, x, y)
    for place, (at, series) in enumerate(chart.missing):
        beside = sum(other == at for other, _ in chart.missing[:place])
        parts.append(_cross(x.at(at) - 11 * beside, TOP - 8, series.style))
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img"><title>{}</title>{}</svg>').format(
        WIDTH, HEIGHT, f"{chart.title}: {chart.y_label} against {chart.x_label}", Markup("").join(parts)
    )


Tick = tuple[float, str]


def _grid(chart: Chart, x: Axis, y: Axis, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]) -> Markup:
    parts, left, right = [], x.start, x.end
    for value, text in x_ticks:
        at = x.at(value)
        parts.append(Markup('<path class="grid" d="M{},{} V{}"/>').format(at, TOP, BOTTOM))
        parts.append(_text(at, BOTTOM + 17, text, "middle"))
    for value, text in y_ticks:
        at = y.at(value)
        parts.append(Markup('<path class="grid" d="M{},{} H{}"/>').format(left, at, right))
        parts.append(_text(left - 6, at + 4, text, "end"))
    if chart.level is not None:
        parts.append(Markup('<path class="level" d="M{},{} H{}"/>').format(left, y.at(chart.level), right))
    parts.append(Markup('<path class="axis" d="M{},{} V{} H{}"/>').format(left, TOP, BOTTOM, right))
    parts.append(_text((left + right) / 2, HEIGHT - 8, chart.x_label, "middle"))
    upwards = Markup('<text transform="translate(13,{}) rotate(-90)" text-anchor="middle">{}</text>')
    parts.append(upwards.format((TOP + BOTTOM) / 2, chart.y_label))
    return Markup("").join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _curve(curve: Curve, x: Axis, y: Axis) -> Markup:
    series, style = curve.series, curve.series.style
    places = [(x.at(a), y.at(b)) for a, b in curve.points]
    ends = [(at, y.at(low), y.at(high)) for (at, _), (low, high) in zip(places, curve.ends, strict=False)]
    parts = []
    if any(low < high for low, high in curve.ends):
        if curve.bars or len(places) == 1:
            parts += [_stroke(f"M{at},{low} V{high}", style, False) for at, low, high in ends]
        else:
            around = [(at, high) for at, _, high in ends] + [(at, low) for at, low, _ in reversed(ends)]
            band = Markup('<path class="band" style="fill:{}" d="{} Z"/>')
            parts.append(band.format(_colour(style), _path(around)))
    if curve.joined and len(places) > 1:
        parts.append(_stroke(_path(places), style, series.emphasis))
    for (a, b), (value, figure) in zip(places, curve.points, strict=True):
        parts.append(_marker(a, b, series, f"{series.label}: {number(figure)} at {number(value)}"))
    return Markup("<g>{}</g>").format(Markup("").join(parts))


def _faint(curve: Curve, x: Axis, y: Axis) -> Markup:
    """A curve of another group."""
    places = [(x.at(a), y.at(b)) for a, b in curve.points]
    if curve.joined and len(places) > 1:
        return Markup('<path class="faint-curve" d="{}"/>').format(_path(places))
    return Markup("").join(
        Markup('<circle class="faint-point" cx="{}" cy="{}" r="2.5"/>').format(*p) for p in places
    )


def _labels(curves: Sequence[Curve], x: Axis, y: Axis) -> list[Markup]:
    """The labels to the right of the axes, each with its marker and a thin line to the end of its curve."""
    ends = [(x.at(curve.points[-1][0]), y.at(curve.points[-1][1])) for curve in curves]
    heights = [float(LABEL_LINE * len(curve.series.lines)) for curve in curves]
    places = spread([end for _, end in ends], heights, TOP - 10, BOTTOM + 12)
    parts = []
    for curve, (at, end), place in zip(curves, ends, places, strict=True):
        place, right, count = round(place, 1), x.end, len(curve.series.lines)
        leader = Markup('<path class="leader" style="stroke:{}" d="M{},{} L{},{}"/>')
        parts.append(leader.format(_colour(curve.series.style), at, end, right + TO_MARKER, place))
        parts.append(_marker(right + TO_MARKER, place, curve.series, ""))
        for row, line in enumerate(curve.series.lines):
            height = round(place + 4 + LABEL_LINE * (row - (count - 1) / 2), 1)
            parts.append(_text(right + TO_TEXT, height, line, "start"))
    return parts


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x},{y}" for x, y in places)


def _stroke(path: str, style: Style, emphasis: bool) -> Markup:
    return Markup('<path fill="none" style="stroke:{};stroke-width:{};stroke-dasharray:{}" d="{}"/>').format(
        _colour(style), 2.6 if emphasis else 1.6, DASHES[style.line], path
    )


def _marker(x: float, y: float, series: Series, tooltip: str) -> Markup:
    """The shapes of matplotlib's markers, with a tooltip."""
    style, radius = series.style, 7.5 if series.emphasis else 4.5
    if style.marker in CROSSES:
        cross = _cross(x, y, style, turn=CROSSES[style.marker] - 45)
        return Markup("<g>{}<title>{}</title></g>").format(cross, tooltip)
    if style.marker in ("o", "8"):
        circle = Markup('<circle cx="{}" cy="{}" r="{}" style="fill:{}"><title>{}</title></circle>')
        return circle.format(x, y, radius * 0.85, _colour(style), tooltip)
    if style.marker == "*":
        corners = _corners(x, y, [radius, 0.4 * radius] * 5)
    else:
        count, first = POLYGONS[style.marker]
        corners = _corners(x, y, [radius] * count, first)
    shape = Markup('<path style="fill:{}" d="{} Z"><title>{}</title></path>')
    return shape.format(_colour(style), _path(corners), tooltip)


def _corners(x: float, y: float, radii: Sequence[float], first: float = 0) -> list[tuple[float, float]]:
    """Corners at equal angles from the top, at these distances from the middle."""
    angles = [math.radians(first + 360 * k / len(radii) - 90) for k in range(len(radii))]
    return [
        (round(x + r * math.cos(angle), 1), round(y + r * math.sin(angle), 1))
        for r, angle in zip(radii, angles, strict=True)
    ]


def _cross(x: float, y: float, style: Style, turn: float = 0) -> Markup:
    return Markup(
        '<path transform="translate({},{}) rotate({})" fill="none" style="stroke:{};stroke-width:2.4" '
        'd="M-4,-4 L4,4 M-4,4 L4,-4"/>'
    ).format(x, y, turn, _colour(style))


def _colour(style: Style) -> str:
    """Black becomes the page's text colour, which is light on a dark page."""
    return "currentColor" if style.colour == BLACK else style.colour


def _ticks(axis: Axis, *, whole: bool = False) -> list[float]:
    """About five round values within an axis."""
    if axis.log:
        powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5)):
            found = [s * 10.0**p for p in powers for s in steps if axis.low <= s * 10.0**p <= axis.high]
            if len(found) >= 3:
                return found
        # Over such a short range the axis is nearly linear.
    step = 10.0 ** math.floor(math.log10((axis.high - axis.low) / 4))
    step *= next(k for k in (1, 2, 2.5, 5, 10) if step * k >= (axis.high - axis.low) / 6)
    step = float(math.ceil(step)) if whole else step
    first = math.ceil(axis.low / step)
    # Without the last bits of the product.
    digits = 2 - math.floor(math.log10(step))
    return [round(step * k, digits) for k in range(first, math.floor(axis.high / step) + 1)]


def _labelled(values: Sequence[float], axis: Axis) -> list[Tick]:
    """The values whose labels do not overlap the one before; linear axes have equal decimals."""
    texts = [number(value) for value in values]
    if not axis.log or axis.high < 10 * axis.low:
        digits = next((d for d in range(9) if all(round(value, d) == value for value in values)), None)
        if digits is not None:
            texts = [f"{value:,.{digits}f}".replace("-", "−") for value in values]
    upright = axis.start == BOTTOM
    kept: list[Tick] = []
    for value, text in zip(values, texts, strict=True):
        room = LINE if upright or not kept else DIGIT * (len(text) + len(kept[-1][1])) / 2 + 6
        if not kept or abs(axis.at(value) - axis.at(kept[-1][0])) >= room:
            kept.append((value, text))
    return kept
