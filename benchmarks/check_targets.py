"""Does Poly-NL cost what it promises? Every target with the measured ratio; exit code 1 if one is missed.

    python benchmarks/check_targets.py            # all of them, about 15 minutes on 2 idle cores
    python benchmarks/check_targets.py --only peers resnet
    python benchmarks/check_targets.py --quick    # a minute, to try this program

A ratio is one of medians of interleaved runs: 20 of them, fewer if a round takes long (at least 5), more
if it takes next to no time. The reference is nn.Conv2d(C, C, 1, bias=False) on the same fp32 map, which is
contiguous except in the group channels_last. The allocator is primed: it keeps freed memory, so that neither
side pays for fresh pages (see `prime_allocator`).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn

from polynl import PolyNL
from polynl.bench.cases import BY_NAME, REFERENCE, randomised
from polynl.bench.measure import Task, interleaved_seconds, prime_allocator, task, timed
from polynl.bench.memory import peak_bytes
from polynl.bench.networks import NETWORKS
from polynl.environment import environment
from polynl.files import write_atomically
from polynl.functional.poly_nl import FORMS
from polynl.results.benchmark import ALLOCATOR_NOTES, STEPS, Point, Step, fitted_exponent
from polynl.results.formats import plural

Group = Literal[
    "forward",
    "training",
    "median",
    "wide",
    "small",
    "channels_last",
    "auto",
    "memory",
    "exponent",
    "peers",
    "resnet",
]
GROUPS: dict[Group, str] = {
    "forward": "forward ÷ 1×1 convolution, N ≥ 4C",
    "training": "forward + backward ÷ 1×1 convolution, N ≥ 12C",
    "median": "either step ÷ 1×1 convolution, median over the sizes with N ≥ 12C",
    "wide": "either step ÷ 1×1 convolution, N < C, C ≥ 256, N ≥ 196",
    "small": "forward ÷ 1×1 convolution, 1×64×7×7",
    "channels_last": "ratio to the 1×1 convolution in channels_last − that in NCHW",
    "auto": "auto ÷ best forced form",
    "memory": "peak memory of a training step ÷ 1×1 convolution, N ≥ 12C",
    "exponent": "k of time ∝ N^k over the top decade",
    "peers": "Poly-NL ÷ peer of the same inner width, N ≥ 196",
    "resnet": "ResNet-50 with Poly-NL at res4 ÷ plain, inference",
}
ON_THE_GRID: set[Group] = {"forward", "training", "median", "wide", "auto", "memory"}
OFF_THE_GRID: tuple[Group, ...] = ("small", "channels_last", "exponent", "peers", "resnet")
# Ratios where N ≥ 12C: at every size, and the median over the sizes.
MOST: dict[Step, float] = {"forward": 1.9, "training": 1.75}
MEDIAN_MOST: dict[Step, float] = {"forward": 1.8, "training": 1.65}
# Batch, channels and side of the maps that are measured in both layouts.
BOTH_LAYOUTS = ((1, 64, 56), (8, 64, 56), (1, 256, 28), (1, 256, 56), (1, 512, 28), (1, 1024, 14))
# Calls per run on a map for which one call takes tens of microseconds.
CALLS = 50
# ResNet-50 with Poly-NL, by the block's reduction.
RESNET_MOST = {1: 1.17, 4: 1.06}
CONV = BY_NAME[REFERENCE].build
# Peers by the factor to which they narrow the channels.
PEERS = {"mmcv_dot_product": 2, "mmcv_softmax": 2, "timm": 8, "efficient_nl": 2, "latent_gnn": 4}


@dataclass(frozen=True)
class Options:
    """Check the cost that Poly-NL promises, on an otherwise idle machine."""

    only: tuple[Group, ...] = tuple(GROUPS)
    """The groups of targets to check."""
    quick: bool = False
    """Measure a few small points with few runs, to try this program."""
    max_conv_seconds: float = 0.3
    """Skip points where the convolution's forward pass alone is expected to take longer."""
    seconds_per_point: float = 12.0
    """Time after which a point gets fewer than 20 runs."""
    threads: int | None = None
    """CPU threads (default: all)."""
    out: Path | None = None
    """JSON file for all ratios."""


@dataclass(frozen=True)
class Check:
    """One measured ratio against its target."""

    group: Group
    where: str
    measured: float
    required: str
    ok: bool
    runs: int


@dataclass
class Checker:
    """Measures, judges and prints."""

    options: Options
    console: Console
    checks: list[Check] = field(default_factory=list)
    large: dict[Step, list[tuple[float, int]]] = field(default_factory=lambda: {step: [] for step in STEPS})
    """Ratio and runs of every size with N ≥ 12C."""

    def judge(
        self,
        group: Group,
        where: str,
        measured: float,
        *,
        most: float = math.inf,
        least: float = -math.inf,
        runs: int,
    ) -> None:
        """Print one ratio and whether it is within its limits."""
        limits = [f"≥ {least:g}" if least > -math.inf else "", f"≤ {most:g}" if most < math.inf else ""]
        required = " and ".join(limit for limit in limits if limit)
        check = Check(group, where, measured, required, least <= measured <= most, runs)
        self.checks.append(check)
        verdict = "[green]ok    [/]" if check.ok else "[bold red]MISSED[/]"
        line = f"{verdict} {group:13} {where:48} {measured:6.2f}  {required}  ({plural(runs, 'run')})"
        self.console.print(line, highlight=False, soft_wrap=True)

    def medians(self, tasks: Mapping[str, Task], most: int = 20) -> tuple[dict[str, float], int]:
        """The median seconds of every task, and of how many interleaved runs."""
        prime_allocator()
        for one in tasks.values():
            timed(one)
        a_round = sum(timed(one) for one in tasks.values())
        most = 5 if self.options.quick else 60 if a_round < 0.05 else most
        runs = max(min(5, most), min(most, int(self.options.seconds_per_point / a_round)))
        seconds = interleaved_seconds(tasks, runs=runs, warmup=0 if a_round > 1 else 1)
        return {name: statistics.median(taken) for name, taken in seconds.items()}, runs

    # The groups

    def grid(self) -> None:
        """Poly-NL and the convolution over batches, channels and positions."""
        quick, wanted = self.options.quick, ON_THE_GRID & set(self.options.only)
        batches, widths = ((1,), (64, 256)) if quick else ((1, 8), (64, 256, 512, 1024, 2048))
        sides = (7, 14, 56) if quick else (7, 14, 28, 56, 112, 256)
        # Multiply-adds per second of a 1×1 convolution of 256 channels.
        rate = 56**2 * 256**2 / self.medians({"conv": _task(CONV, Point("forward", 1, 56, 256))})[0]["conv"]
        every = list(itertools.product(batches, widths, sides))
        kept = [
            (b, c, side)
            for b, c, side in every
            if b * side**2 * c**2 / rate <= self.options.max_conv_seconds and 4 * b * side**2 * c <= 1.5e9
        ]
        for size in kept:
            self._at_size(*size, wanted)
        if "median" in wanted:
            self._over_sizes()
        left_out = len(every) - len(kept)
        self.console.print(
            f"{len(kept)} points of the grid measured, {left_out} left out as too slow or large"
        )

    def _at_size(self, batch: int, c: int, side: int, wanted: set[Group]) -> None:
        points = {step: Point(step, batch, side, c) for step in STEPS}
        if "memory" in wanted and side**2 >= 12 * c:
            ours, theirs = (peak_bytes(_task(build, points["training"])) for build in (_poly_nl(), CONV))
            self.judge("memory", _where(points["training"]), ours / theirs, most=1.3, runs=1)
        x = _map(points["forward"])
        for step, point in points.items():
            groups = wanted & _groups_at(step, c, side**2)
            if groups:
                self._at_point(point, x, groups)

    def _at_point(self, point: Point, x: Tensor, groups: set[Group]) -> None:
        forms = FORMS if "auto" in groups else ("auto",)
        tasks = {str(form): _task(_poly_nl(form=form), point, x) for form in forms}
        seconds, runs = self.medians({**tasks, "conv": _task(CONV, point, x)})
        where, step, (c, n) = _where(point), point.step, (point.size("channels"), point.side**2)

        def judge(group: Group, where: str, ratio: float, **limits: float) -> None:
            if group in groups:
                self.judge(group, where, ratio, runs=runs, **limits)

        ratio = seconds["auto"] / seconds["conv"]
        if n >= 12 * c:
            self.large[step].append((ratio, runs))
            judge(step, f"{where}, N ≥ 12C", ratio, most=MOST[step])
        else:
            judge("forward", f"{where}, 4C ≤ N < 12C", ratio, most=2.4)
        judge("wide", f"{where}, {step}", ratio, most=3.2)
        if "auto" in groups:
            best = min(seconds[form] for form in forms if form != "auto")
            self.judge("auto", f"{where}, {step}", seconds["auto"] / best, most=1.1, runs=runs)

    def _over_sizes(self) -> None:
        for step, found in self.large.items():
            if found:
                ratios, runs = zip(*found, strict=True)
                where = f"{plural(len(found), 'size')}, {step}"
                median = statistics.median(ratios)
                self.judge("median", where, median, most=MEDIAN_MOST[step], runs=min(runs))

    def small(self) -> None:
        """A map so small that calling the operators takes longer than their work."""
        point = Point("forward", 1, 7, 64)
        x = _map(point)
        tasks = {"poly_nl": _task(_poly_nl(), point, x), "conv": _task(CONV, point, x)}
        seconds, runs = self.medians({name: _repeated(one, CALLS) for name, one in tasks.items()})
        ratio = seconds["poly_nl"] / seconds["conv"]
        self.judge("small", f"{_where(point)}, {CALLS} calls per run", ratio, most=3.0, runs=runs)

    def channels_last(self) -> None:
        """The ratio in one layout against that in the other, all four measured together."""
        layouts = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
        for batch, c, side in ((1, 64, 28),) if self.options.quick else BOTH_LAYOUTS:
            for point in (Point(step, batch, side, c) for step in STEPS):
                x = _map(point)
                maps = {layout: x.to(memory_format=layouts[layout]) for layout in layouts}
                tasks = {
                    f"{name} {layout}": _task(build, point, maps[layout], memory_format)
                    for layout, memory_format in layouts.items()
                    for name, build in (("poly_nl", _poly_nl()), ("conv", CONV))
                }
                seconds, runs = self.medians(tasks)
                nchw, last = (seconds[f"poly_nl {name}"] / seconds[f"conv {name}"] for name in layouts)
                where = f"{_where(point)}, {point.step}: {last:.2f} − {nchw:.2f}"
                self.judge("channels_last", where, last - nchw, most=0.3, runs=runs)

    def exponent(self) -> None:
        """How time grows with the positions."""
        sides = (20, 40, 60) if self.options.quick else (82, 112, 160, 224, 256)
        for channels in (64,) if self.options.quick else (64, 256):
            for step in STEPS:
                tasks = {str(side): _task(_poly_nl(), Point(step, 1, side, channels)) for side in sides}
                seconds, runs = self.medians(tasks)
                k = fitted_exponent([side**2 for side in sides], [seconds[str(side)] for side in sides])
                assert k is not None
                where = f"C {channels}, N {sides[0] ** 2} to {sides[-1] ** 2}, {step}"
                self.judge("exponent", where, k, least=0.9, most=1.1, runs=runs)

    def peers(self) -> None:
        """Against other non-local layers, Poly-NL narrowed as they are."""
        names = [name for name in PEERS if BY_NAME[name].available()]
        for name in PEERS.keys() - set(names):
            self.console.print(f"{name} is left out: its package is not installed", style="yellow")
        for channels in (64,) if self.options.quick else (64, 256, 512, 1024):
            for side in (14,) if self.options.quick else (14, 28, 56):
                for step in STEPS:
                    self._against_peers(names, Point(step, 1, side, channels))

    def _against_peers(self, names: list[str], point: Point) -> None:
        x = _map(point)
        tasks = {name: _task(BY_NAME[name].build, point, x) for name in names}
        for reduction in {PEERS[name] for name in names}:
            tasks[f"poly_nl {reduction}"] = _task(_poly_nl(reduction=reduction), point, x)
        seconds, runs = self.medians(tasks)
        for name in names:
            ratio = seconds[f"poly_nl {PEERS[name]}"] / seconds[name]
            where = f"{name}, C {point.channels}, N {point.side**2}, {point.step}"
            self.judge("peers", where, ratio, most=1.0, runs=runs)

    def resnet(self) -> None:
        """A whole network."""
        side = 64 if self.options.quick else 224
        x = torch.randn(1, 3, side, side)
        build = NETWORKS["resnet50"].build
        tasks = {"plain": task(build(None, "res4"), x, "forward")}
        for reduction in RESNET_MOST:
            block = _poly_nl(reduction=reduction)
            tasks[f"reduction {reduction}"] = task(build(block, "res4"), x, "forward")
        seconds, runs = self.medians(tasks, most=40)
        for reduction, most in RESNET_MOST.items():
            where = f"batch 1, {side}×{side}, reduction {reduction}"
            ratio = seconds[f"reduction {reduction}"] / seconds["plain"]
            self.judge("resnet", where, ratio, most=most, runs=runs)

    def summary(self) -> Iterator[str]:
        """A line for each group."""
        for group in self.options.only:
            found = [check for check in self.checks if check.group == group]
            if found:
                reached = sum(check.ok for check in found)
                ratios = [check.measured for check in found]
                span = f"{min(ratios):.2f} to {max(ratios):.2f}"
                yield f"{group:13} {reached:3} of {len(found):3} reached, {span}: {GROUPS[group]}"


def _groups_at(step: Step, c: int, n: int) -> set[Group]:
    """The groups of the grid that need a step at a size."""
    groups: set[Group] = {"auto"}
    if n >= 12 * c:
        groups |= {step, "median"}
    elif n >= 4 * c and step == "forward":
        groups.add("forward")
    elif n < c and c >= 256 and n >= 196:
        groups.add("wide")
    return groups


def _poly_nl(**options: object) -> Callable[[int], nn.Module]:
    return lambda channels: PolyNL(channels, init="random", **options)  # type: ignore[arg-type]


def _map(point: Point) -> Tensor:
    return torch.randn(point.batch, point.size("channels"), point.side, point.side)


def _where(point: Point) -> str:
    return f"B {point.batch}, C {point.channels}, N {point.side**2}"


def _task(
    build: Callable[[int], nn.Module],
    point: Point,
    x: Tensor | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Task:
    """A step of a layer; those that are compared share the map, which each finds as warm as the others."""
    module = randomised(build(point.size("channels")), seed=0).to(memory_format=memory_format)
    return task(module, _map(point) if x is None else x, point.step)


def _repeated(one: Task, calls: int) -> Task:
    def run() -> None:
        for _ in range(calls):
            one.run()

    return Task(run, one.reset)


def main() -> None:
    """Measure, print, and exit with 1 where something falls short."""
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    checker = Checker(options, Console())
    primed = prime_allocator()
    checker.console.print(ALLOCATOR_NOTES[primed], highlight=False, soft_wrap=True)
    if ON_THE_GRID & set(options.only):
        checker.grid()
    for group in OFF_THE_GRID:
        if group in options.only:
            getattr(checker, group)()
    checker.console.print()
    for line in checker.summary():
        checker.console.print(line, highlight=False, soft_wrap=True)
    if options.out is not None:
        content = {
            "environment": environment("cpu"),
            "allocator_primed": primed,
            "checks": [asdict(check) for check in checker.checks],
        }
        write_atomically(options.out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0 if all(check.ok for check in checker.checks) else 1)


if __name__ == "__main__":
    main()
