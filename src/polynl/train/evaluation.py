"""Scoring a model on the images of a recipe, every one of them once."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset

from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.models.weights import load_weights
from polynl.tasks.base import Task
from polynl.train.interruption import ignore_signals
from polynl.train.processes import Processes, joined
from polynl.train.recipe import Recipe
from polynl.train.sampler import EveryImageOnce


def evaluate(
    task: Task,
    model: nn.Module,
    recipe: Recipe,
    processes: Processes,
    *,
    stop: Callable[[], bool] = lambda: False,
    tick: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, float], int] | None:
    """The scores over all processes, and how many images could not be read; None where `stop` says so first.

    The model is called without its wrapper for training, so that processes may have different numbers of
    batches.
    """
    model.eval()
    scorer, skipped = task.scorer(processes.device), 0
    batches = _batches(task, recipe, processes)
    with torch.no_grad(), autocast(recipe, processes.device):
        for number, batch in enumerate(batches):
            if stop():
                break
            tick(f"{number}/{len(batches)}")
            skipped += len(batch.bad)
            if len(batch):
                scorer.update(model, batch.to(processes.device, channels_last=recipe.channels_last))
    (stopped,) = processes.any(stop())
    if stopped:
        return None
    (total,) = processes.sums(skipped)
    return scorer.compute(), int(total)


def evaluate_checkpoint(
    recipe: Recipe, checkpoint: Path, out: Path | None, console: Console
) -> dict[str, float]:
    """Score weights in a file on the images of a recipe; the first process shows and writes the scores."""
    task = recipe.build_task()
    task.check()
    if not checkpoint.is_file():
        raise SettingsError(f"--checkpoint: there is no file {checkpoint}.")
    with joined(recipe.device) as processes:
        model = task.model()
        try:
            load_weights(model, checkpoint)
        except ValueError as error:
            raise SettingsError(f"--checkpoint: {error}") from error
        scored = evaluate(task, model.to(processes.device), recipe, processes)
        assert scored is not None, "nothing asked it to stop"
        scores, skipped = scored
        if processes.first:
            for name, score in scores.items():
                console.print(f"{name:>8} {score:.3f}", highlight=False)
            if skipped:
                console.print(f"{skipped} unreadable images were skipped.", highlight=False)
            if out is not None:
                content = {"checkpoint": str(checkpoint), **scores, "skipped": skipped}
                write_atomically(out, json.dumps(content, indent=1) + "\n")
    return scores


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """The precision of the recipe; float32 is none."""
    enabled = recipe.precision != "float32"
    return torch.autocast(device.type, getattr(torch, recipe.precision) if enabled else None, enabled=enabled)


def _batches(task: Task, recipe: Recipe, processes: Processes) -> DataLoader[Any]:
    data = task.val_set()
    batch = recipe.val_batch
    if batch is None:
        batch = max(1, recipe.total_batch(processes.count) // processes.count)
    return DataLoader(
        cast(Dataset[Any], data),
        batch_sampler=EveryImageOnce(len(data), batch=batch, rank=processes.rank, processes=processes.count),
        collate_fn=partial(task.collate, training=False),
        num_workers=recipe.workers,
        worker_init_fn=ignore_signals,
        pin_memory=processes.device.type == "cuda",
        generator=torch.Generator(),
    )
