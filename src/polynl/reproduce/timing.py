"""What the trained networks and single layers cost on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from polynl.bench.cases import BY_NAME, REFERENCE
from polynl.bench.layers import run_layers
from polynl.bench.measure import Task as Timed
from polynl.bench.measure import interleaved_seconds
from polynl.bench.networks import count_costs
from polynl.bench.settings import LayerSettings
from polynl.errors import SettingsError
from polynl.report.load import LAYERS
from polynl.reproduce.settings import PAPER, ReproduceSettings
from polynl.results.benchmark import STEPS, Results
from polynl.results.study import Costs
from polynl.tasks.base import Batch, Images, Task
from polynl.train.config import Recipe

RUNS = 20
# The layers that the paper compares, with both forms of its own; others are timed if they are trained.
METHODS = (REFERENCE, *PAPER, "poly_nl_direct")
# They take about a minute and a few seconds on two cores.
SIZES: dict[str, Any] = {"runs": 20, "channels": (64, 128, 256, 512), "sides": (14, 20, 28, 40, 56)}
QUICK_SIZES: dict[str, Any] = {"runs": 5, "channels": (64, 128, 256), "sides": (14, 28, 40)}


def measure_costs(models: Mapping[str, nn.Module], recipe: Recipe, *, timed: bool = True) -> dict[str, Costs]:
    """The costs of networks on a recipe's first images; runs are interleaved, so noise falls on all alike.

    A forward pass is one over a batch of validation images, a training step one on training images. Without
    `timed` there are only counts.
    """
    task, size = recipe.build_task(), recipe.total_batch(1) if timed else 1
    images = _first(task.val_set(), size, partial(task.collate, training=False)).images
    inputs = [task.inputs(image) for image in images]
    counts = {name: count_costs(model, inputs[0]) for name, model in models.items()}
    if not timed:
        return {name: Costs(**counts[name]) for name in models}
    batch = _first(task.train_set(), size, partial(task.collate, training=True))
    batch = batch.to(torch.device("cpu"), channels_last=recipe.channels_last)
    medians: dict[str, dict[str, float]] = {name: {} for name in models}
    for step in STEPS:
        steps = {
            name: _forward(model, inputs) if step == "forward" else _training_step(task, model, batch)
            for name, model in models.items()
        }
        for name, seconds in interleaved_seconds(steps, runs=RUNS).items():
            medians[name][f"{step}_seconds"] = statistics.median(seconds)
    return {name: Costs(**counts[name], **medians[name]) for name in models}


def _first(data: Images, count: int, collate: Callable[[Sequence[Any]], Batch]) -> Batch:
    return collate([data[index] for index in range(min(count, len(data)))])


def _forward(model: nn.Module, inputs: Sequence[Any]) -> Timed:
    """Classifiers take a batch, detectors a list of images."""
    batched = isinstance(inputs[0], Tensor)
    together = torch.cat(list(inputs)) if batched else [image for images in inputs for image in images]
    return Timed(torch.no_grad()(lambda: model.eval()(together)))


def _training_step(task: Task, model: nn.Module, batch: Batch) -> Timed:
    def run() -> None:
        torch.stack(list(task.losses(model.train(), batch).values())).sum().backward()

    return Timed(run, lambda: model.zero_grad(set_to_none=True))


def measure_layers(settings: ReproduceSettings) -> Results:
    """Resume `polynl bench layers` in --out; start again on another machine or version of polynl."""
    silent = Console(quiet=True)
    if not settings.overwrite:
        try:
            return run_layers(layer_settings(settings, overwrite=False), silent)
        except SettingsError:
            # Trainings may be resumed under another commit, but times must come from one.
            pass
    return run_layers(layer_settings(settings, overwrite=True), silent)


def layer_settings(settings: ReproduceSettings, *, overwrite: bool) -> LayerSettings:
    """A small `polynl bench layers`."""
    return LayerSettings(
        blocks=(*METHODS, *(name for name in settings.selected() if name in BY_NAME)),
        device="cuda" if torch.cuda.is_available() else "cpu",
        **(QUICK_SIZES if settings.quick else SIZES),
        out=settings.out / LAYERS,
        resume=not overwrite,
        overwrite=overwrite,
    )
