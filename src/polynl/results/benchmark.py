"""A benchmark: every raw time with its settings and environment, and the JSON file that holds them."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from polynl.errors import SettingsError, shown
from polynl.files import read_json, write_atomically
from polynl.results.benchmark_schema import Step as Step
from polynl.results.benchmark_schema import benchmark_problem
from polynl.results.formats import byte_size, duration, if_measured

SCHEMA = 1
STEPS: tuple[Step, ...] = get_args(Step)
STEP_TITLES: dict[Step, str] = {"forward": "forward", "training": "forward + backward"}
Axis = Literal["channels", "positions"]
AXIS_TITLES: dict[Axis, str] = {"channels": "channels C", "positions": "positions N"}
# The largest interquartile range, divided by the median, of times that are worth a ratio.
MOST_SPREAD = 1.0
BUSY = "busy"
BUSY_NOTE = (
    f"{BUSY}: the machine was busy with something else. These times spread by more than {MOST_SPREAD:.0%} of "
    "their median, so they have no ratios; measure again when nothing else runs."
)
NO_RATIOS = "no ratios, because float16 convolutions are unusually slow on CPUs"
ALLOCATOR_NOTES = {
    True: "The allocator was primed: it kept freed memory, so timed runs had next to no page faults.",
    False: "The allocator was not primed, which needs glibc: times may include page faults.",
}


@dataclass(frozen=True, order=True)
class Point:
    """A size and a step at which all methods are measured together; `channels` is None for networks.

    `side` is the height of a map; `width` is None for square ones.
    """

    step: Step
    batch: int
    side: int
    channels: int | None = None
    width: int | None = None

    @classmethod
    def of(cls, step: Step, shape: Sequence[int]) -> Point:
        """The point of maps of shape (b, c, h, w)."""
        batch, channels, height, width = shape
        return cls(step, batch, height, channels, None if width == height else width)

    @property
    def spatial(self) -> tuple[int, int]:
        """Height and width of a map."""
        return self.side, self.side if self.width is None else self.width

    def size(self, axis: Axis) -> int:
        """The channels, or the positions of one map."""
        return math.prod(self.spatial) if axis == "positions" else int(self.channels or 0)

    def __str__(self) -> str:
        sizes = (self.batch, self.channels, *self.spatial)
        return f"{self.step}, {'×'.join(str(size) for size in sizes if size is not None)}"


@dataclass(frozen=True)
class Measurement:
    """One method at one point; without times, `skipped` says why."""

    method: str
    point: Point
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    skipped: str | None = None

    @property
    def median(self) -> float | None:
        """The median of the runs."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile of the runs."""
        if len(self.seconds) < 2:
            return (self.seconds[0], self.seconds[0]) if self.seconds else None
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float | None:
        """The interquartile range, divided by the median."""
        if self.median is None or self.quartiles is None:
            return None
        return (self.quartiles[1] - self.quartiles[0]) / self.median

    @property
    def disturbed(self) -> bool:
        """Whether the times differ so much that their median says nothing: other programs took the time."""
        return self.spread is not None and self.spread > MOST_SPREAD

    def to_json(self) -> dict[str, Any]:
        """The fields of the point and of the measurement, and the median for the reader's convenience."""
        return {
            "method": self.method,
            **dataclasses.asdict(self.point),
            "seconds": list(self.seconds),
            "median_seconds": self.median,
            "peak_bytes": self.peak_bytes,
            "skipped": self.skipped,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_json`."""
        # Files of older versions have no width.
        sizes: dict[str, Any] = {f.name: entry.get(f.name) for f in dataclasses.fields(Point)}
        point = Point(**sizes)
        return cls(entry["method"], point, tuple(entry["seconds"]), entry["peak_bytes"], entry["skipped"])


@dataclass(frozen=True)
class Quantity:
    """Something measured: how to get it, how to write it, and the unit and scale of charts."""

    name: str
    heading: str
    value: Callable[[Measurement], float | None]
    written: Callable[[float], str]
    unit: str = ""
    scale: float = 1.0

    def text(self, measurement: Measurement) -> str:
        """The value with its unit."""
        return if_measured(self.value(measurement), self.written)

    def ratio(self, measurement: Measurement, base: Measurement) -> float | None:
        """The value divided by that of another measurement."""
        value, below = self.value(measurement), self.value(base)
        return value / below if below and value is not None else None


TIME = Quantity("time", "time", attrgetter("median"), duration, "ms", 1e3)
MEMORY = Quantity("memory", "peak memory", attrgetter("peak_bytes"), byte_size, "MiB", 2**-20)
THROUGHPUT = Quantity(
    "throughput", "images/s", lambda m: m.point.batch / m.median if m.median else None, "{:.1f}".format
)


@dataclass
class Results:
    """A benchmark, finished or not: `methods` maps each name to its label and its counted costs."""

    kind: str
    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    reference: str
    measurements: list[Measurement] = field(default_factory=list)

    def label(self, method: str) -> str:
        """The name of a method in tables and figures."""
        return str(self.methods[method]["label"])

    def at(self, method: str, point: Point) -> Measurement | None:
        """The measurement, if it was made."""
        return next((m for m in self.measurements if m.method == method and m.point == point), None)

    def ratio(self, measurement: Measurement, quantity: Quantity = TIME) -> float | None:
        """The quantity divided by that of the reference at the same point, if `has_ratios`.

        None for times that are `disturbed`, here or in the reference.
        """
        base = self.at(self.reference, measurement.point) if self.has_ratios else None
        if base is None or self.disturbed(measurement, quantity):
            return None
        return quantity.ratio(measurement, base)

    def disturbed(self, measurement: Measurement, quantity: Quantity = TIME) -> bool:
        """Whether there is no ratio because the machine was busy; memory does not depend on that."""
        if quantity is MEMORY or not measurement.seconds:
            return False
        base = self.at(self.reference, measurement.point)
        return measurement.disturbed or (base is not None and base.disturbed)

    @property
    def has_ratios(self) -> bool:
        """Whether the reference can be compared with: on CPUs, a convolution in float16 cannot.

        Most CPUs have no instructions for it, and without them it takes many times as long as in float32: a
        ratio to it says nothing about a layer.
        """
        return (self.settings.get("device"), self.settings.get("dtype")) != ("cpu", "float16")

    def notes(self) -> list[str]:
        """What a reader of the numbers has to know about how they were measured."""
        primed = self.settings.get("allocator_primed")
        notes = [] if primed is None else [ALLOCATOR_NOTES[primed]]
        if self.has_ratios and any(m.disturbed for m in self.measurements):
            notes.insert(0, BUSY_NOTE)
        return notes if self.has_ratios else [f"There are {NO_RATIOS}.", *notes]

    def place(self, axis: Axis) -> str:
        """What is fixed along an axis."""
        s = self.settings
        if axis == "positions":
            return f"{s['at_channels']} channels"
        return f"{s['at_side']}×{s['at_side']} positions"

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes (b, c, h, w) that were chosen instead of sweeps, if any."""
        return [tuple(shape) for shape in self.settings.get("shape", ())]

    def sweep(self, axis: Axis, step: Step) -> list[Point]:
        """The measured points along one axis, in ascending order."""
        s = self.settings
        if self.shapes():
            return []
        sizes = {
            "channels": {(s["at_side"], channels) for channels in s["channels"]},
            "positions": {(side, s["at_channels"]) for side in s["sides"]},
        }[axis]
        points = {m.point for m in self.measurements if m.point.step == step}
        wanted = (point for point in points if (point.side, point.channels) in sizes)
        return sorted(wanted, key=lambda point: point.size(axis))

    def along(self, points: Sequence[Point], method: str) -> list[Measurement]:
        """The measurements of a method at these points."""
        return [m for point in points if (m := self.at(method, point)) is not None]

    def exponent(self, method: str, axis: Axis, step: Step) -> float | None:
        """k of time ∝ size^k, over the top decade of the measured sizes."""
        timed = [m for m in self.along(self.sweep(axis, step), method) if m.seconds and not m.disturbed]
        return fitted_exponent([m.point.size(axis) for m in timed], [m.median or 0.0 for m in timed])

    def skipped_lines(self, step: Step | None = None) -> list[str]:
        """What was not measured and why: a line per method, step and width (default: of both steps)."""
        groups: dict[tuple[str, Step, int | None], list[Measurement]] = {}
        for m in self.measurements:
            if m.skipped is not None and step in (None, m.point.step):
                groups.setdefault((m.method, m.point.step, m.point.channels), []).append(m)
        lines = []
        for (method, at_step, channels), found in groups.items():
            first = min(found, key=lambda m: m.point.size("positions"))
            where = f"at N {'≥' if len(found) > 1 else '='} {first.point.size('positions'):,}"
            width = "" if channels is None else f", {channels} channels"
            what = f"{self.label(method)}, {STEP_TITLES[at_step]}{width}"
            lines.append(f"{what}: not measured {where}: {first.skipped}")
        return lines

    def save(self, path: Path) -> None:
        """Write the file atomically: neither a reader nor a killed process leaves half of it."""
        content = {
            "schema": SCHEMA,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "measurements"},
            "measurements": [measurement.to_json() for measurement in self.measurements],
        }
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """The benchmark in a file, or a SettingsError that says what is wrong with the file."""
        content = read_json(path)
        version = content.get("schema") if isinstance(content, dict) else None
        if version != SCHEMA:
            raise SettingsError(
                f"{path} has schema {shown(version)}; this version of polynl reads schema {SCHEMA}."
            )
        problem = benchmark_problem(content)
        if problem is not None:
            raise SettingsError(f"{path} is not the JSON of a benchmark: {problem}.")
        fields = {f.name: content[f.name] for f in dataclasses.fields(cls)}
        fields["measurements"] = [Measurement.from_json(entry) for entry in fields["measurements"]]
        return cls(**fields)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between two settings or environments, one per line."""
    return [
        f"{name}: {_shown(old.get(name))} → {_shown(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """k of values ∝ sizes^k by least squares in logarithms, over the top decade of the sizes.

    None if the decade has fewer than two sizes.

    >>> round(fitted_exponent([1, 10, 20, 100], [7.0, 2.0, 8.0, 200.0]), 6)
    2.0
    """
    top = max(sizes, default=0.0)
    pairs = zip(sizes, values, strict=True)
    points = [(math.log(size), math.log(value)) for size, value in pairs if size >= top / 10]
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope
