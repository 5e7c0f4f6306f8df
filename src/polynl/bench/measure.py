"""Timing: the runs of all methods are interleaved, and none of them pays for fresh memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polynl.results.benchmark import Step

# Parameters of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def _nothing() -> None:
    """No preparation."""


@dataclass(frozen=True)
class Task:
    """What is timed, `run`, and what is called before it; the result is freed off the clock."""

    run: Callable[[], Any]
    reset: Callable[[], None] = _nothing


def task(module: nn.Module, x: Tensor, step: Step) -> Task:
    """One forward pass in eval mode without gradients, or one forward and backward pass in train mode.

    A training step computes gradients of the input and of all parameters from a fixed random cotangent; they
    are set to None off the clock. Do not share a module between steps.
    """
    module.train(step == "training")
    return Task(torch.no_grad()(functools.partial(module, x))) if step == "forward" else _training(module, x)


def _training(module: nn.Module, x: Tensor) -> Task:
    x = x.detach().requires_grad_()
    with torch.no_grad():
        output = module(x)
    generator = torch.Generator(x.device).manual_seed(1)
    cotangent = torch.randn(output.shape, generator=generator, device=x.device, dtype=x.dtype)
    # A gradient arrives in the layout of the map, as it would from the next layer of a network.
    cotangent = torch.empty_like(output).copy_(cotangent)
    parameters = list(module.parameters())

    def run() -> Tensor:
        z: Tensor = module(x)
        z.backward(cotangent)
        return z

    def reset() -> None:
        for tensor in (x, *parameters):
            tensor.grad = None

    return Task(run, reset)


@functools.cache
def prime_allocator() -> bool:
    """Make malloc keep what is freed until the process ends; returns whether it does.

    By default glibc returns large blocks to the system, and the next run pays for fresh pages. For a
    convolution that is thousands of page faults, which take as long as its work; a layer that allocates its
    memory in smaller pieces has fewer, and would look cheap next to it. With these two settings no block of
    any size is mapped on its own, and the heap is never trimmed, so after a warm-up no run has page faults.
    Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def interleaved_seconds(
    tasks: Mapping[str, Task],
    *,
    runs: int,
    warmup: int = 2,
    device: str = "cpu",
    between: Callable[[], None] = _nothing,
) -> dict[str, list[float]]:
    """The seconds of every run of every task, round by round, so that noise falls on all tasks alike.

    The order changes every round, see `balanced_order`. `between` is called after every run, off the clock.
    The allocator is primed first.
    """
    prime_allocator()
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for name in list(tasks) * warmup:
        timed(tasks[name], device)
        between()
    with _without_garbage_collection():
        for number in range(runs):
            for name in balanced_order(list(tasks), number):
                seconds[name].append(timed(tasks[name], device))
                between()
    return seconds


def balanced_order(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: over the rounds each name is at each place, and after each other, equally often.

    A task leaves its mark on caches and on the allocator, so rotating one fixed order would favour whoever
    follows a light neighbour. This is Williams's design: a zigzag, rotated by one every round, and for an odd
    count read backwards every other time.

    >>> [" ".join(balanced_order("abcd", number)) for number in range(4)]
    ['a b d c', 'b c a d', 'c d b a', 'd a c b']
    """
    count = len(names)
    zigzag = [-(-i // 2) if i % 2 else -(i // 2) for i in range(count)]
    order = [names[(place + number) % count] for place in zigzag]
    backwards = count % 2 and number // count % 2
    return order[::-1] if backwards else order


def timed(task: Task, device: str = "cpu") -> float:
    """The seconds of one run, without freeing its result."""
    task.reset()
    synchronise(device)
    start = time.perf_counter()
    result = task.run()
    synchronise(device)
    seconds = time.perf_counter() - start
    del result
    task.reset()
    return seconds


def synchronise(device: str) -> None:
    """Wait for the device if it runs asynchronously."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
