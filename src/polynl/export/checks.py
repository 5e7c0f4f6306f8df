"""Comparing an exported program with the model that it was made from: values and latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from polynl.export.runtimes import Run


class ExportError(RuntimeError):
    """A model that a runtime cannot run, or not with the same values. No file was written."""


@dataclass(frozen=True)
class Comparison:
    """One input in both."""

    shape: tuple[int, ...]
    difference: float
    """The largest of all outputs, each divided by the largest value that PyTorch has there."""


@dataclass(frozen=True)
class Export:
    """What was written, and how it compares with PyTorch."""

    file: Path
    runtime: str
    """Its label."""
    comparisons: tuple[Comparison, ...]
    seconds: float
    """The median latency of the example in the runtime."""
    torch_seconds: float
    """The same in PyTorch."""

    @property
    def difference(self) -> float:
        """The largest of all comparisons."""
        return max(comparison.difference for comparison in self.comparisons)


def compared(run: Run, reference: Run, x: Tensor) -> Comparison:
    """The outputs of one input; an ExportError if they differ in number or shape."""
    shape, actual, expected = tuple(x.shape), run(x), reference(x)
    shapes = [[tuple(y.shape) for y in outputs] for outputs in (actual, expected)]
    if shapes[0] != shapes[1]:
        raise ExportError(f"for an input {shape}, the outputs are {shapes[0]}; expected {shapes[1]}")
    return Comparison(shape, max(map(relative_difference, actual, expected), default=0.0))


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, divided by the largest expected value; NaN if there is one in either."""
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.double(), expected.double()
    scale = expected.abs().max().item()
    return (actual - expected).abs().max().item() / (scale if scale > 0 else 1.0)


def median_seconds(runs: Sequence[Callable[[], Any]], count: int = 10, most: float = 10.0) -> list[float]:
    """The medians of so many runs, in turns, so that noise falls on all alike; of fewer if they take long."""
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + most
    while len(seconds[0]) < count and (not seconds[0] or time.perf_counter() < end):
        for run, taken in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]
