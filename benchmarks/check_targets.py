"""Does Poly-NL cost what it promises? Every target with the measured ratio; exit code 1 if one is missed.

    python benchmarks/check_targets.py            # all of them, about 12 minutes on 2 idle cores
    python benchmarks/check_targets.py --only peers resnet

A ratio is one of medians of interleaved runs: 20 of them, fewer if a round takes long (at least 5), more
if it takes next to no time. The reference is nn.Conv2d(C, C, 1, bias=False) on the same fp32 map.
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
from polynl.bench.measure import Task, interleaved_seconds, task, timed
from polynl.bench.memory import peak_bytes
from polynl.bench.networks import NETWORKS
from polynl.environment import environment
from polynl.files import write_atomically
from polynl.functional.poly_nl import FORMS
from polynl.results.benchmark import STEPS, Point, Step, fitted_exponent
from polynl.results.formats import plural

Group = Literal["forward", "training", "direct", "auto", "memory", "exponent", "peers", "resnet"]
GROUPS: dict[Group, str] = {
    "forward": "forward ÷ 1×1 convolution",
    "training": "forward + backward ÷ 1×1 convolution, N ≥ 12C",
    "direct": "forward + backward of the direct form ÷ that of auto, N ≥ 12C",
    "auto": "auto ÷ best forced form",
    "memory": "peak memory of a training step ÷ 1×1 convolution, N ≥ 12C",
    "exponent": "k of time ∝ N^k over the top decade",
    "peers": "Poly-NL ÷ peer of the same inner width, N ≥ 196",
    "resnet": "ResNet-50 with Poly-NL at res4 ÷ plain, inference",
}
ON_THE_GRID: set[Group] = {"forward", "training", "direct", "auto", "memory"}
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
        line = f"{verdict} {group:9} {where:48} {measured:6.2f}  {required}  ({plural(runs, 'run')})"
        self.console.print(line, highlight=False, soft_wrap=True)

    def medians(self, tasks: Mapping[str, Task]) -> tuple[dict[str, float], int]:
        """The median seconds of every task, and of how many interleaved runs."""
        for one in tasks.values():
            timed(one)
        a_round = sum(timed(one) for one in tasks.values())
        most = 5 if self.options.quick else 60 if a_round < 0.05 else 20
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
        left_out = len(every) - len(kept)
        self.console.print(
            f"{len(kept)} points of the grid measured, {left_out} left out as too slow or large"
        )

    def _at_size(self, batch: int, c: int, side: int, wanted: set[Group]) -> None:
        n = side**2
        large, where = n >= 12 * c, f"B {batch}, C {c}, N {n}"
        points = {step: Point(step, batch, side, c) for step in STEPS}
        forms = [form for form in FORMS if form == "auto" or wanted & {"auto", "direct"}]
        steps = [step for step in STEPS if wanted & _groups_of(step, large)]
        if "memory" in wanted and large:
            ours, theirs = (peak_bytes(_task(build, points["training"])) for build in (_poly_nl(), CONV))
            self.judge("memory", where, ours / theirs, most=1.3, runs=1)
        seconds: dict[str, float] = {}
        runs = 0
        x = _map(points["forward"])
        for step in steps:
            tasks = {f"{step} {form}": _task(_poly_nl(form=form), points[step], x) for form in forms}
            medians, runs = self.medians({**tasks, f"{step} conv": _task(CONV, points[step], x)})
            seconds |= medians

        def judge(group: Group, where: str, ours: str, theirs: str, **limits: float) -> None:
            if group in wanted:
                self.judge(group, where, seconds[ours] / seconds[theirs], runs=runs, **limits)

        if large or n >= 4 * c or n < c:
            most = 1.9 if large else 2.4 if n >= 4 * c else 3.2
            range_ = "N ≥ 12C" if large else "4C ≤ N < 12C" if n >= 4 * c else "N < C"
            judge("forward", f"{where}, {range_}", "forward auto", "forward conv", most=most)
        if large:
            judge("training", where, "training auto", "training conv", most=1.6)
            judge("direct", where, "training direct", "training auto", least=2.2)
        for step in steps if "auto" in wanted else ():
            best = min((f"{step} {form}" for form in forms if form != "auto"), key=seconds.__getitem__)
            judge("auto", f"{where}, {step}", f"{step} auto", best, most=1.1)

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
        tasks = {
            "plain": task(build(None, "res4"), x, "forward"),
            "poly_nl": task(build(BY_NAME["poly_nl"].build, "res4"), x, "forward"),
        }
        seconds, runs = self.medians(tasks)
        where = f"batch 1, {side}×{side}"
        self.judge("resnet", where, seconds["poly_nl"] / seconds["plain"], most=1.15, runs=runs)

    def summary(self) -> Iterator[str]:
        """A line for each group."""
        for group in self.options.only:
            found = [check for check in self.checks if check.group == group]
            if found:
                reached = sum(check.ok for check in found)
                ratios = [check.measured for check in found]
                span = f"{min(ratios):.2f} to {max(ratios):.2f}"
                yield f"{group:9} {reached:3} of {len(found):3} reached, {span}: {GROUPS[group]}"


def _groups_of(step: Step, large: bool) -> set[Group]:
    """The groups of the grid that need a step at a point."""
    if step == "forward":
        return {"forward", "auto"}
    return {"training", "direct", "auto"} if large else {"auto"}


def _poly_nl(**options: object) -> Callable[[int], nn.Module]:
    return lambda channels: PolyNL(channels, init="random", **options)  # type: ignore[arg-type]


def _map(point: Point) -> Tensor:
    return torch.randn(point.batch, point.size("channels"), point.side, point.side)


def _task(build: Callable[[int], nn.Module], point: Point, x: Tensor | None = None) -> Task:
    """A step of a layer; those that are compared share the map, which each finds as warm as the others."""
    module = randomised(build(point.size("channels")), seed=0)
    return task(module, _map(point) if x is None else x, point.step)


def main() -> None:
    """Measure, print, and exit with 1 where something falls short."""
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    checker = Checker(options, Console())
    if ON_THE_GRID & set(options.only):
        checker.grid()
    for group in ("exponent", "peers", "resnet"):
        if group in options.only:
            getattr(checker, group)()
    checker.console.print()
    for line in checker.summary():
        checker.console.print(line, highlight=False, soft_wrap=True)
    if options.out is not None:
        content = {"environment": environment("cpu"), "checks": [asdict(check) for check in checker.checks]}
        write_atomically(options.out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0 if all(check.ok for check in checker.checks) else 1)


if __name__ == "__main__":
    main()
