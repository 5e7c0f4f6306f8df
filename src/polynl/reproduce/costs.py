"""What a block costs in the network that was trained."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from polynl.bench.measure import Step, interleaved_seconds, task
from polynl.bench.networks import counts

RUNS = 20


@dataclass(frozen=True)
class Cost:
    """Of one network; times are medians over a batch."""

    parameters: int
    multiply_adds: int
    forward_seconds: float
    training_seconds: float


def measured_costs(models: Mapping[str, nn.Module], *, batch: int, size: int) -> dict[str, Cost]:
    """Every network on the same images; the runs are interleaved, so that noise falls on all alike."""
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    counted = {name: counts(model, images[:1]) for name, model in models.items()}
    steps: tuple[Step, Step] = ("forward", "training")
    seconds = {}
    for step in steps:
        tasks = {name: task(model, images, step) for name, model in models.items()}
        seconds[step] = interleaved_seconds(tasks, runs=RUNS)
    return {
        name: Cost(
            **counted[name],
            forward_seconds=statistics.median(seconds["forward"][name]),
            training_seconds=statistics.median(seconds["training"][name]),
        )
        for name in models
    }
