"""Measure both forms of Poly-NL over a grid of sizes and fit the cost model of `cheaper_form` to it.

    python benchmarks/fit_forms.py

The three constants are searched for with which the model's choice loses least against the better form, in the
mean and where it loses most; a set of its own for single maps without gradients (`ONE_MAP`), which
`poly_nl_of_one` computes. The allocator is primed, so that neither form pays for fresh pages (see
`prime_allocator`). On a busy machine the losses are noise: run it on an idle one.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import torch

from polynl import PolyNL
from polynl.bench.measure import interleaved_seconds, prime_allocator, task
from polynl.functional.poly_nl import MEASURED, ONE_MAP, FormCosts, cheaper_form
from polynl.results.benchmark import ALLOCATOR_NOTES, STEPS

BATCHES, CHANNELS = (1, 8), (64, 128, 256, 512, 1024, 2048)
SIDES = (7, 10, 14, 20, 28, 40, 56, 80, 112, 160, 256)
LARGEST = 2**25  # elements of a map
SLOWEST = 1e11  # multiply-adds of a training step in the dearer form

Size = tuple[int, int, int]


def measured(size: Size, runs: int) -> dict[str, dict[str, float]]:
    """Median seconds by step and form."""
    b, c, side = size
    x = torch.randn(b, c, side, side)
    found: dict[str, dict[str, float]] = {}
    for step in STEPS:
        tasks = {form: task(PolyNL(c, form=form, init="random"), x, step) for form in ("direct", "gram")}
        seconds = interleaved_seconds(tasks, runs=runs, warmup=1)
        found[step] = {form: statistics.median(taken) for form, taken in seconds.items()}
    return found


def losses(
    results: dict[Size, dict[str, dict[str, float]]], costs: FormCosts
) -> list[tuple[float, str, Size]]:
    """How many times slower than the better form the model's choice is, ascending."""
    found = []
    for (b, c, side), kinds in results.items():
        for kind, times in kinds.items():
            form = cheaper_form(side**2, c, c, kind == "training", costs)
            found.append((times[form] / min(times.values()), kind, (b, c, side)))
    return sorted(found)


def fitted(
    results: dict[Size, dict[str, dict[str, float]]],
) -> tuple[FormCosts, list[tuple[float, str, Size]]]:
    """The costs that lose least, and their losses."""
    candidates = itertools.product(
        (0.6, 0.7, 0.8, 0.9, 1.0),
        (0.8, 1.0, 1.2, 1.4, 1.6, 2.0, 2.2, 2.4, 2.6, 3.0),
        (0, 10, 20, 40, 60, 80, 120, 160, 240, 320),
    )
    fits = []
    for costs in itertools.starmap(FormCosts, candidates):
        found = losses(results, costs)
        fits.append((statistics.fmean(loss for loss, _, _ in found) + 0.1 * found[-1][0], costs, found))
    _, costs, found = min(fits)
    return costs, found


def main() -> None:
    """Measure, fit, and print the constants and what they lose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--keep", type=Path, help="a JSON file for the measurements; if it exists, only fit")
    arguments = parser.parse_args()
    results: dict[Size, dict[str, dict[str, float]]] = {}
    if arguments.keep is not None and arguments.keep.exists():
        results = {tuple(point): kinds for point, kinds in json.loads(arguments.keep.read_text())}
    else:
        print(ALLOCATOR_NOTES[prime_allocator()], flush=True)
        for point in itertools.product(BATCHES, CHANNELS, SIDES):
            b, c, side = point
            if b * c * side**2 <= LARGEST and b * c * c * (9 * side**2 + 4 * c) <= SLOWEST:
                results[point] = measured(point, arguments.runs)
                ratios = {k: f"{t['gram'] / t['direct']:.2f}" for k, t in results[point].items()}
                print(f"b={b} c={c} n={side**2}: gram ÷ direct", ratios, flush=True)
        if arguments.keep is not None:
            arguments.keep.write_text(json.dumps(list(results.items())))
    one_map = {size: {"forward": times["forward"]} for size, times in results.items() if size[0] == 1}
    others = {
        size: times if size[0] > 1 else {"training": times["training"]} for size, times in results.items()
    }
    for name, costs, part in (("ONE_MAP", ONE_MAP, one_map), ("MEASURED", MEASURED, others)):
        print(f"{name} = {costs} loses", losses(part, costs)[-3:])
        found, lost = fitted(part)
        print(f"{name} = {found} would lose", lost[-3:])


if __name__ == "__main__":
    main()
