"""A line chart as SVG whose text and axes take the page's colours: legible on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from polynl.bench.plots import BLACK, Style

# In units of which the page shows about one a pixel on a phone, so that the text is legible there.
WIDTH, HEIGHT = 360, 280
RIGHT, TOP, BOTTOM = 350, 22, 230
# Of the text: as wide as a digit is in common fonts, and as high as a line.
DIGIT, LINE = 7.4, 18
DASHES = {"-": "none", "--": "6 4", "-.": "7 3 2 3", ":": "2 3"}
# Of corners on a circle, and the angle of the first one from the top.
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
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
CROSSES = {"X": 45, "P": 0, "1": 0, "2": 0, "3": 45}


@dataclass(frozen=True)
class Curve:
    """Points from left to right; `ends` are the lowest and highest value at each, where there is a range."""

    label: str
    style: Style
    points: Sequence[tuple[float, float]]
    ends: Sequence[tuple[float, float]] = ()
    emphasis: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """What is drawn; `missing` are values of x at which a line has none, and `level` is a line across."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Curve]
    log: tuple[bool, bool] = (False, False)
    x_ticks: Sequence[float] = ()
    level: float | None = None
    missing: Sequence[tuple[float, Style]] = field(default_factory=tuple)


@dataclass(frozen=True)
class Axis:
    """From values to places."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """Where a value is."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool) -> Axis:
        """An axis with a margin around the values; none goes below zero where no value does."""
        low, high = min(values), max(values)
        if log:
            margin = (high / low) ** 0.06 if high > low else 2.0
            return cls(low / margin, high * margin, start, end, log)
        margin = (high - low) * 0.06 if high > low else abs(high) * 0.1 or 1.0
        bottom = low - margin if low < 0 else max(low - margin, 0.0)
        return cls(bottom, high + margin, start, end, log)


def svg(chart: Chart) -> Markup:
    """The chart, with a title of its own that screen readers tell."""
    xs = [x for line in chart.lines for x, _ in line.points] + [x for x, _ in chart.missing]
    ys = [
        y
        for line in chart.lines
        for y in (*(y for _, y in line.points), *(e for pair in line.ends for e in pair))
    ]
    ys += [] if chart.level is None else [chart.level]
    y = Axis.over(ys, BOTTOM, TOP, log=chart.log[1])
    y_ticks = _labelled(_ticks(y), y)
    # The label of the axis stands to the left of the longest figure.
    left = 26 + DIGIT * max((len(text) for _, text in y_ticks), default=0)
    x = Axis.over(xs, left, RIGHT, log=chart.log[0])
    whole = all(value == int(value) for value in xs)
    x_ticks = _labelled(chart.x_ticks or _ticks(x, whole=whole), x)
    parts = [_grid(chart, x, y, x_ticks, y_ticks)]
    parts += [_line(line, x, y) for line in sorted(chart.lines, key=lambda line: line.emphasis)]
    for place, (at, style) in enumerate(chart.missing):
        beside = sum(other == at for other, _ in chart.missing[:place])
        parts.append(_cross(x.at(at) - 11 * beside, TOP - 8, style))
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img"><title>{}</title>{}</svg>').format(
        WIDTH, HEIGHT, f"{chart.title}: {chart.y_label} against {chart.x_label}", Markup("").join(parts)
    )


def swatch(style: Style, *, emphasis: bool = False) -> Markup:
    """A line and its marker, for a legend."""
    return Markup('<svg class="swatch" viewBox="0 0 34 16" aria-hidden="true">{}{}</svg>').format(
        _stroke("M1,8 H33", style, emphasis), _marker(17, 8, style, emphasis, "")
    )


Tick = tuple[float, str]


def _grid(chart: Chart, x: Axis, y: Axis, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick]) -> Markup:
    parts, left = [], x.start
    for value, text in x_ticks:
        at = x.at(value)
        parts.append(Markup('<path class="grid" d="M{},{} V{}"/>').format(at, TOP, BOTTOM))
        parts.append(_text(at, BOTTOM + 17, text, "middle"))
    for value, text in y_ticks:
        at = y.at(value)
        parts.append(Markup('<path class="grid" d="M{},{} H{}"/>').format(left, at, RIGHT))
        parts.append(_text(left - 6, at + 4, text, "end"))
    if chart.level is not None:
        parts.append(Markup('<path class="level" d="M{},{} H{}"/>').format(left, y.at(chart.level), RIGHT))
    parts.append(Markup('<path class="axis" d="M{},{} V{} H{}"/>').format(left, TOP, BOTTOM, RIGHT))
    parts.append(_text((left + RIGHT) / 2, HEIGHT - 8, chart.x_label, "middle"))
    middle = (TOP + BOTTOM) / 2
    parts.append(
        Markup('<text transform="translate(13,{}) rotate(-90)" text-anchor="middle">{}</text>').format(
            middle, chart.y_label
        )
    )
    return Markup("").join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _line(line: Curve, x: Axis, y: Axis) -> Markup:
    places = [(x.at(a), y.at(b)) for a, b in line.points]
    parts = []
    spread = any(low < high for low, high in line.ends)
    if spread and line.joined and len(places) > 1:
        around = [(at, y.at(high)) for (at, _), (_, high) in zip(places, line.ends, strict=True)]
        around += [
            (at, y.at(low)) for (at, _), (low, _) in reversed(list(zip(places, line.ends, strict=True)))
        ]
        path = "M" + " L".join(f"{a},{b}" for a, b in around) + " Z"
        parts.append(Markup('<path class="band" style="fill:{}" d="{}"/>').format(_colour(line.style), path))
    elif spread:
        for (at, _), (low, high) in zip(places, line.ends, strict=True):
            parts.append(_stroke(f"M{at},{y.at(low)} V{y.at(high)}", line.style, False))
    if line.joined and len(places) > 1:
        parts.append(_stroke("M" + " L".join(f"{a},{b}" for a, b in places), line.style, line.emphasis))
    for (a, b), (value, figure) in zip(places, line.points, strict=True):
        told = f"{line.label}: {number(figure)} at {number(value)}"
        parts.append(_marker(a, b, line.style, line.emphasis, told))
    return Markup("<g>{}</g>").format(Markup("").join(parts))


def _stroke(path: str, style: Style, emphasis: bool) -> Markup:
    return Markup('<path fill="none" style="stroke:{};stroke-width:{};stroke-dasharray:{}" d="{}"/>').format(
        _colour(style), 2.6 if emphasis else 1.6, DASHES[style.line], path
    )


def _marker(x: float, y: float, style: Style, emphasis: bool, told: str) -> Markup:
    """The shapes of matplotlib's markers; `told` is shown under the pointer."""
    radius = 7.5 if emphasis else 4.5
    if style.marker in CROSSES:
        return Markup("<g>{}<title>{}</title></g>").format(
            _cross(x, y, style, turn=CROSSES[style.marker] - 45), told
        )
    if style.marker in ("o", "8"):
        shape = Markup('<circle cx="{}" cy="{}" r="{}" style="fill:{}">').format(
            x, y, radius * 0.85, _colour(style)
        )
        return shape + Markup("<title>{}</title></circle>").format(told)
    corners, first = (5, 0) if style.marker == "*" else POLYGONS[style.marker]
    path = _star(x, y, radius) if style.marker == "*" else _corners(x, y, radius, corners, first)
    return Markup('<path style="fill:{}" d="{}"><title>{}</title></path>').format(_colour(style), path, told)


def _corners(x: float, y: float, radius: float, count: int, first: float) -> str:
    angles = [math.radians(first + 360 * k / count - 90) for k in range(count)]
    return (
        "M"
        + " L".join(f"{x + radius * math.cos(a):.1f},{y + radius * math.sin(a):.1f}" for a in angles)
        + " Z"
    )


def _star(x: float, y: float, radius: float) -> str:
    places = []
    for k in range(10):
        angle, r = math.radians(36 * k - 90), radius * (1 if k % 2 == 0 else 0.4)
        places.append(f"{x + r * math.cos(angle):.1f},{y + r * math.sin(angle):.1f}")
    return "M" + " L".join(places) + " Z"


def _cross(x: float, y: float, style: Style, turn: float = 0) -> Markup:
    return Markup(
        '<path transform="translate({},{}) rotate({})" fill="none" style="stroke:{};stroke-width:2.4" '
        'd="M-4,-4 L4,4 M-4,4 L4,-4"/>'
    ).format(x, y, turn, _colour(style))


def _colour(style: Style) -> str:
    """Black is the page's colour of text, which is light on a dark page."""
    return "currentColor" if style.colour == BLACK else style.colour


def _ticks(axis: Axis, *, whole: bool = False) -> list[float]:
    """Round values within an axis, about five."""
    if axis.log:
        powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5)):
            found = [s * 10.0**p for p in powers for s in steps if axis.low <= s * 10.0**p <= axis.high]
            if len(found) >= 3:
                return found
        # Over so short a range the axis is nearly linear.
    step = 10.0 ** math.floor(math.log10((axis.high - axis.low) / 4))
    step *= next(k for k in (1, 2, 2.5, 5, 10) if step * k >= (axis.high - axis.low) / 6)
    step = float(math.ceil(step)) if whole else step
    first = math.ceil(axis.low / step)
    return [round(step * k, 10) for k in range(first, math.floor(axis.high / step) + 1)]


def _labelled(values: Sequence[float], axis: Axis) -> list[Tick]:
    """Those values whose labels do not run into the one before; with one number of decimals on a line."""
    texts = [number(value) for value in values]
    if not axis.log or axis.high < 10 * axis.low:
        digits = next((d for d in range(9) if all(round(value, d) == value for value in values)), 9)
        texts = [f"{value:,.{digits}f}".replace("-", "−") for value in values]
    upright = axis.start == BOTTOM
    kept: list[Tick] = []
    for value, text in zip(values, texts, strict=True):
        room = LINE if upright or not kept else DIGIT * (len(text) + len(kept[-1][1])) / 2 + 6
        if not kept or abs(axis.at(value) - axis.at(kept[-1][0])) >= room:
            kept.append((value, text))
    return kept


def number(value: float) -> str:
    """A figure as short as it can be read.

    >>> number(3136), number(0.25), number(49.123), number(2.0), number(0.0661), number(4.6e-05)
    ('3,136', '0.25', '49.1', '2', '0.066', '4.6·10⁻⁵')
    """
    if not math.isfinite(value):
        return "no number"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}".replace("-", "−")
    if abs(value) < 1e-3 or abs(value) >= 1e9:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits}·10{str(int(power)).translate(RAISED)}".replace("-", "−")
    if abs(value) < 0.1:
        return f"{value:.2g}".replace("-", "−")
    places = next(places for limit, places in ((100, 0), (10, 1), (0, 2)) if abs(value) >= limit)
    return f"{value:.{places}f}".replace("-", "−")
