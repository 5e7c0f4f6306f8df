"""Peak memory, measured: the most that a step holds in addition to what was allocated before it.

On CUDA it is the caching allocator's own record, `torch.cuda.max_memory_allocated`.

On the CPU it is the running total of PyTorch's allocator: the profiler records the size of every allocation
and release, including temporaries inside an operator. It does not see what libraries allocate themselves,
such as the packing buffers of a matrix product, nor what the system rounds up.

Counted: the result, what is kept for the backward pass, all temporaries and, in a training step, the
gradients of the input and of the parameters. Not counted, because they exist before the step: the input,
the parameters, and the cotangent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from polynl.bench.measure import Task


def peak_bytes(task: Task, device: str = "cpu") -> int:
    """The most bytes that one run of the task holds at once, in addition to those held before it."""
    task.reset()
    peak = _peak_on_cuda(task) if device == "cuda" else _peak_on_cpu(task)
    task.reset()
    return peak


def _peak_on_cuda(task: Task) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = task.run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def _peak_on_cpu(task: Task) -> int:
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _silent_stderr():
        profiler.start()
    try:
        result = task.run()
    finally:
        with _silent_stderr():
            profiler.stop()
    del result
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        held += change
        peak = max(peak, held)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hide what the profiler prints from C++ when it starts and stops; other lines are not lost."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
