"""Measure both forms of Poly-NL over a grid of sizes and fit the cost model of `preferred_form` to it.

    python benchmarks/fit_forms.py

The three constants are searched for with which the model's choice loses least against the better form, in the
mean and where it loses most. On a busy machine the losses are noise: run it on an idle one.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from polynl import PolyNL
from polynl.functional.poly_nl import MEASURED, FormCosts, preferred_form

BATCHES, CHANNELS = (1, 8), (64, 128, 256, 512, 1024, 2048)
SIDES = (7, 10, 14, 20, 28, 40, 56, 80, 112, 160, 256)
LARGEST = 2**25  # elements of a map
SLOWEST = 1e11  # multiply-adds of a training step in the dearer form

Point = tuple[int, int, int]


def seconds(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median time of each call, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(runs + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def measured(point: Point, runs: int) -> dict[str, dict[str, float]]:
    """Seconds by kind of pass and form."""
    b, c, side = point
    x = torch.randn(b, c, side, side, requires_grad=True)
    cotangent = torch.randn_like(x)
    blocks = {form: PolyNL(c, form=form, init="random") for form in ("direct", "gram")}

    def training(block: PolyNL) -> tuple[Tensor, ...]:
        return torch.autograd.grad(block(x), [x, *block.parameters()], cotangent)

    steps = {form: lambda block=block: training(block) for form, block in blocks.items()}
    calls = {form: lambda block=block: block(x) for form, block in blocks.items()}
    with torch.no_grad():
        inference = seconds(calls, runs)
    return {"inference": inference, "training": seconds(steps, runs)}


def losses(
    results: dict[Point, dict[str, dict[str, float]]], costs: FormCosts
) -> list[tuple[float, str, Point]]:
    """How many times slower than the better form the model's choice is, ascending."""
    found = []
    for (b, c, side), kinds in results.items():
        x = torch.empty(b, side * side, c, device="meta")
        for kind, times in kinds.items():
            form = preferred_form(x, c, kind == "training", costs)
            found.append((times[form] / min(times.values()), kind, (b, c, side)))
    return sorted(found)


def main() -> None:
    """Measure, fit, and print the constants and what they lose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--keep", type=Path, help="a JSON file for the measurements; if it exists, only fit")
    arguments = parser.parse_args()
    results: dict[Point, dict[str, dict[str, float]]] = {}
    if arguments.keep is not None and arguments.keep.exists():
        results = {tuple(point): kinds for point, kinds in json.loads(arguments.keep.read_text())}
    else:
        for point in itertools.product(BATCHES, CHANNELS, SIDES):
            b, c, side = point
            if b * c * side**2 <= LARGEST and b * c * c * (9 * side**2 + 4 * c) <= SLOWEST:
                results[point] = measured(point, arguments.runs)
                ratios = {k: f"{t['gram'] / t['direct']:.2f}" for k, t in results[point].items()}
                print(f"b={b} c={c} n={side**2}: gram ÷ direct", ratios, flush=True)
        if arguments.keep is not None:
            arguments.keep.write_text(json.dumps(list(results.items())))
    print("with the present constants:", losses(results, MEASURED)[-3:])
    candidates = itertools.product(
        (0.6, 0.7, 0.8, 0.9, 1.0), (0.8, 1.0, 1.2, 1.4, 1.6, 2.0, 2.4), (0, 10, 20, 40, 60, 80, 120, 160)
    )
    fits = []
    for costs in itertools.starmap(FormCosts, candidates):
        found = losses(results, costs)
        fits.append((statistics.fmean(loss for loss, _, _ in found) + 0.1 * found[-1][0], costs, found[-3:]))
    print("fitted:", *min(fits)[1:], sep="\n")


if __name__ == "__main__":
    main()
