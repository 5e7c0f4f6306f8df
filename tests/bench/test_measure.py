"""Times are taken in balanced order, summed up rightly, and hold no more than the step."""

import ctypes
import gc
import itertools
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from polynl.bench import measure
from polynl.bench.measure import (
    Task,
    balanced_order,
    interleaved_seconds,
    prime_allocator,
    task,
    timed,
)
from polynl.results.benchmark import Measurement, Point, fitted_exponent


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12])
def test_every_round_has_all_and_no_neighbour_is_favoured(count: int) -> None:
    names = [chr(97 + i) for i in range(count)]
    rounds = [balanced_order(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in rounds)
    for place in zip(*rounds, strict=True):
        assert all(place.count(name) == 2 for name in names)
    pairs = [pair for order in rounds for pair in itertools.pairwise(order)]
    assert all(pairs.count(pair) == 2 for pair in itertools.permutations(names, 2))


def test_runs_are_interleaved_in_that_order_after_the_warm_up() -> None:
    calls: list[str] = []
    tasks = {name: Task(lambda name=name: calls.append(name)) for name in "abc"}
    seconds = interleaved_seconds(tasks, runs=4, warmup=1)
    assert calls[:3] == ["a", "b", "c"]
    assert calls[3:] == [name for number in range(4) for name in balanced_order("abc", number)]
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 4, "b": 4, "c": 4}


def test_only_the_step_is_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Result:
        def __del__(self) -> None:
            events.append("freed")

    def run() -> Result:
        events.append("run")
        return Result()

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setattr(measure.time, "perf_counter", clock)
    seconds = timed(Task(run, reset=lambda: events.append("reset")))
    assert events == ["reset", "clock", "run", "clock", "freed", "reset"]
    assert seconds == 2.0


def test_no_garbage_is_collected_meanwhile() -> None:
    seen = []
    interleaved_seconds({"a": Task(lambda: seen.append(gc.isenabled()))}, runs=2, warmup=1)
    assert seen == [True, False, False]
    assert gc.isenabled()


# Prints, for each step, the page faults of fifteen runs after the warm-up, in a process whose allocator was
# not primed before. Results of 64 MiB are above any threshold up to which glibc keeps memory by itself.
PAGE_FAULTS = """
import os, resource, torch
from polynl.bench.measure import Task, interleaved_seconds, task

def print_faults(name):
    step = task(torch.nn.Conv2d(16, 16, 1, bias=False), torch.randn(1, 16, 1024, 1024), name)
    counts = []

    def counted():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        result = step.run()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return result

    interleaved_seconds({"convolution": Task(counted, step.reset)}, runs=15, warmup=3)
    print(*counts[3:], flush=True)

for name in ("forward", "training"):
    child = os.fork()
    if child == 0:
        print_faults(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be primed")
def test_a_repeated_convolution_has_no_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward, training = ([int(count) for count in line.split()] for line in done.stdout.splitlines())
    assert len(forward) == len(training) == 15
    # Without priming each run has 16,384 of them and more. With it, a run has them only while the heap grows,
    # several times on a busy machine: threads that take turns leave holes of other sizes.
    assert sorted(forward)[4] < 500
    assert sorted(training)[4] < 500


def test_only_glibc_is_primed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("this C library may have no mallopt")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert prime_allocator.__wrapped__() is False


def test_forward_has_no_gradients_and_eval_mode() -> None:
    module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5))
    step = task(module, torch.ones(1, 3, 2, 2), "forward")
    assert not module.training
    assert not step.run().requires_grad


def test_training_gives_the_same_gradients_every_time_and_drops_them() -> None:
    module, x = nn.Conv2d(3, 3, 1, bias=False), torch.randn(2, 3, 4, 4)
    step = task(module, x, "training")
    assert module.training
    gradients = []
    for _ in range(2):
        step.reset()
        assert module.weight.grad is None
        step.run()
        assert module.weight.grad is not None
        gradients.append(module.weight.grad.clone())
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0
    assert x.grad is None, "the map belongs to all methods"


def test_median_and_quartiles() -> None:
    m = Measurement("a", Point("forward", 1, 8, 4), (5.0, 1.0, 3.0, 2.0, 100.0))
    assert m.median == 3.0
    assert m.quartiles == (2.0, 5.0)
    assert m.spread == 1.0
    assert Measurement("a", m.point, (7.0,)).quartiles == (7.0, 7.0)
    skipped = Measurement("a", Point("forward", 1, 8, 4), skipped="no")
    assert skipped.median is skipped.quartiles is skipped.spread is None


@pytest.mark.parametrize("k", [0.0, 1.0, 1.37, 2.0])
def test_exponent_of_a_power_law(k: float) -> None:
    sizes = [49, 196, 784, 3136, 12544]
    assert fitted_exponent(sizes, [3e-6 * n**k for n in sizes]) == pytest.approx(k, abs=1e-12)


def test_exponent_looks_at_the_top_decade_only() -> None:
    sizes = [10, 100, 1000, 2000, 5000]
    values = [9.0, 9.0] + [n / 1000 for n in sizes[2:]]
    assert fitted_exponent(sizes, values) == pytest.approx(1.0)


def test_exponent_needs_two_sizes() -> None:
    assert fitted_exponent([], []) is None
    assert fitted_exponent([10], [1.0]) is None
    assert fitted_exponent([10, 1000], [1.0, 2.0]) is None
