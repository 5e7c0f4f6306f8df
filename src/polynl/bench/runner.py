"""The loop over points and methods: skip, measure, save, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from polynl.bench.measure import Task, interleaved_seconds, prime_allocator, task, timed
from polynl.bench.memory import peak_bytes
from polynl.bench.settings import Settings
from polynl.environment import environment
from polynl.errors import changed_run_error, existing_run_error, is_out_of_memory
from polynl.files import write_atomically
from polynl.results.benchmark import Measurement, Point, Results, differences
from polynl.results.tables import Table, as_rich, benchmark_page

WARMUP = 2
Build = Callable[[str, Point], tuple[nn.Module, Tensor]]
Refusal = Callable[[str, Point], str | None]


def start_or_resume(
    path: Path, settings: Settings, *, kind: str, methods: dict[str, dict[str, Any]], reference: str
) -> Results:
    """The benchmark in the file with --resume, else a new one; without --overwrite it replaces none."""
    fresh = Results(
        kind=kind,
        command=settings.command("bench", kind),
        settings=settings.measured() | {"allocator_primed": prime_allocator()},
        environment=environment(settings.device),
        methods=methods,
        reference=reference,
    )
    if not path.exists() or settings.overwrite:
        return fresh
    if not settings.resume:
        raise existing_run_error(path)
    old = Results.load(path)
    for what in ("settings", "environment"):
        changed = differences(getattr(old, what), getattr(fresh, what))
        if changed:
            raise changed_run_error(path, f"other {what}", changed)
    return old


def measure_points(
    results: Results,
    path: Path,
    points: Sequence[Point],
    build: Build,
    refusal: Refusal,
    settings: Settings,
    console: Console,
) -> None:
    """Measure the points that the results lack, and save the results after each.

    `build` returns a method's module, in float32 on the CPU, and its input; `refusal` says why a method is
    not tried at a point, or returns None.
    """
    # A file that lacks one of the methods at a point was damaged: they are measured together.
    done = {point for point in points if all(results.at(method, point) for method in results.methods)}
    results.measurements = [measurement for measurement in results.measurements if measurement.point in done]
    left = [point for point in points if point not in done]
    results.save(path)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = _Bar(progress, len(points), len(points) - len(left))
        for point in left:
            bar.show(str(point))
            results.measurements += _at_point(results, point, build, refusal, settings, bar)
            results.save(path)
            bar.advance()


def write_tables(
    results: Results, path: Path, tables: Sequence[Table], console: Console, figures: Sequence[Path] = ()
) -> None:
    """Print the tables, the notes and what was skipped, write all as Markdown, and name all files."""
    for table in tables:
        console.print(as_rich(table, console.width))
    for line in (*results.notes(), *results.skipped_lines()):
        console.print(line, style="dim", highlight=False, markup=False)
    page = path.with_suffix(".md")
    write_atomically(page, benchmark_page(results, tables))
    console.print("Written: " + ", ".join(map(str, (path, page, *figures))), soft_wrap=True, markup=False)


def _at_point(
    results: Results, point: Point, build: Build, refusal: Refusal, settings: Settings, bar: _Bar
) -> list[Measurement]:
    skipped: dict[str, str] = {}
    tasks: dict[str, Task] = {}
    peaks: dict[str, int] = {}
    for method in results.methods:
        bar.show(f"{point}: {results.label(method)}")
        reason = refusal(method, point) or _too_slow_before(results, method, point)
        if reason is None:
            try:
                tasks[method] = _step(*build(method, point), point, settings)
                peaks[method] = peak_bytes(tasks[method], settings.device)
                seconds, limit = timed(tasks[method], settings.device), settings.time_limit_s
                if seconds > limit:
                    reason = (
                        f"one step takes {seconds:.1f} s at N = {point.size('positions')}, limit {limit:g} s"
                    )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = "out of memory"
        if reason is not None:
            skipped[method] = reason
            tasks.pop(method, None)
    bar.show(str(point))
    every = interleaved_seconds(
        tasks, runs=settings.runs, warmup=WARMUP, device=settings.device, between=bar.refresh
    )
    return [
        Measurement(m, point, tuple(every.get(m, ())), peaks.get(m), skipped.get(m)) for m in results.methods
    ]


def _step(module: nn.Module, x: Tensor, point: Point, settings: Settings) -> Task:
    """A step of the module, in the dtype and layout of the settings."""
    module = module.to(settings.device, getattr(torch, settings.dtype))
    if settings.channels_last:
        module = module.to(memory_format=torch.channels_last)
    if settings.compile:
        module.compile(dynamic=False)
    return task(module, x, point.step)


def random_maps(shape: Sequence[int], settings: Settings) -> Tensor:
    """A batch of normal random maps."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(settings.seed))
    x = x.to(settings.device, getattr(torch, settings.dtype))
    return x.to(memory_format=torch.channels_last) if settings.channels_last else x


def _too_slow_before(results: Results, method: str, point: Point) -> str | None:
    """The reason at a smaller map, if the method was too slow there.

    Only a method that was too slow was skipped after its memory had been measured.
    """
    for earlier in results.measurements:
        smaller = earlier.point.side < point.side and replace(earlier.point, side=point.side) == point
        if earlier.method == method and smaller and earlier.skipped and earlier.peak_bytes is not None:
            return earlier.skipped
    return None


class _Bar:
    """A progress bar that is drawn only between runs: a drawing thread would disturb the timing."""

    def __init__(self, progress: Progress, points: int, done: int) -> None:
        self._progress = progress
        self._bar = progress.add_task("", total=points, completed=done)
        self._drawn = 0.0

    def show(self, text: str) -> None:
        self._progress.update(self._bar, description=text)
        self.refresh()

    def advance(self) -> None:
        self._progress.advance(self._bar)

    def refresh(self) -> None:
        if time.monotonic() - self._drawn > 0.1:
            self._progress.refresh()
            self._drawn = time.monotonic()
