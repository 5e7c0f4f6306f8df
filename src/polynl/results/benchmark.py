"""The file of a run: every raw time with its settings and environment, on disk after each measured point."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polynl.bench.measure import Step, quartiles
from polynl.errors import SettingsError
from polynl.files import write_atomically

SCHEMA = 1


@dataclass(frozen=True, order=True)
class Point:
    """A size and a step, at which all methods are measured together; a network has no `channels`."""

    step: Step
    batch: int
    side: int
    channels: int | None = None

    def __str__(self) -> str:
        sizes = (self.batch, self.channels, self.side, self.side)
        return f"{self.step}, {'×'.join(str(size) for size in sizes if size is not None)}"


@dataclass(frozen=True)
class Measurement:
    """One method at one point; `skipped` says why there are no times."""

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
        """Between them lies half of the runs."""
        return quartiles(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """The interquartile range, divided by the median."""
        if self.median is None or self.quartiles is None:
            return None
        return (self.quartiles[1] - self.quartiles[0]) / self.median

    def to_json(self) -> dict[str, Any]:
        """The point's fields beside the measurement's, and the median for readers without a library."""
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
        point = Point(*(entry[f.name] for f in dataclasses.fields(Point)))
        return cls(entry["method"], point, tuple(entry["seconds"]), entry["peak_bytes"], entry["skipped"])


@dataclass
class Results:
    """A run, finished or not: `methods` maps each name to its label and what is known without measuring."""

    kind: str
    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    reference: str
    measurements: list[Measurement] = field(default_factory=list)

    def label(self, method: str) -> str:
        """What a method is called in tables and figures."""
        return str(self.methods[method]["label"])

    def at(self, method: str, point: Point) -> Measurement | None:
        """The measurement, if it was made."""
        return next((m for m in self.measurements if m.method == method and m.point == point), None)

    def ratio(self, measurement: Measurement) -> float | None:
        """The median divided by that of the reference at the same point."""
        base = self.at(self.reference, measurement.point)
        if base is None or base.median is None or measurement.median is None:
            return None
        return measurement.median / base.median

    def memory_ratio(self, measurement: Measurement) -> float | None:
        """The peak memory divided by that of the reference at the same point."""
        base = self.at(self.reference, measurement.point)
        if base is None or not base.peak_bytes or measurement.peak_bytes is None:
            return None
        return measurement.peak_bytes / base.peak_bytes

    def save(self, path: Path) -> None:
        """Write all of it or nothing: whoever reads, or kills this process, never sees half a file."""
        content = {
            "schema": SCHEMA,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "measurements"},
            "measurements": [measurement.to_json() for measurement in self.measurements],
        }
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """The run in a file, or an error that says what is wrong with the file."""
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise SettingsError(f"There is no file {path}.") from None
        except (OSError, ValueError) as error:
            raise SettingsError(f"{path} is not the JSON of a benchmark: {error}") from error
        version = content.get("schema") if isinstance(content, dict) else None
        if version != SCHEMA:
            raise SettingsError(f"{path} has schema {version!r}, and this version of polynl reads {SCHEMA}.")
        try:
            fields = {f.name: content[f.name] for f in dataclasses.fields(cls)}
            fields["measurements"] = [Measurement.from_json(entry) for entry in fields["measurements"]]
        except KeyError as error:
            raise SettingsError(f"{path} is not the JSON of a benchmark: {error} is missing.") from error
        except TypeError:
            raise SettingsError(f"{path} is not the JSON of a benchmark: it has no measurements.") from None
        return cls(**fields)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two settings or environments, a line each."""
    return [
        f"{name}: {_shown(old.get(name))} → {_shown(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
