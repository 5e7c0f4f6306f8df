"""Scoring a model on the images of a recipe, every one of them once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from torch import nn

from polynl.errors import RunStoppedError, SettingsError
from polynl.files import check_destination, write_atomically
from polynl.models.weights import load_weights
from polynl.tasks.base import DetectionScorer, DetectionTask, Scorer, Task
from polynl.train.config import Recipe
from polynl.train.loading import EveryImageOnce, Reader
from polynl.train.processes import Processes, autocast, joined, set_up_torch, to_device


def evaluate(
    task: Task,
    model: nn.Module,
    recipe: Recipe,
    processes: Processes,
    *,
    reader: Reader | None = None,
    scorer: Scorer | None = None,
    stop: Callable[[], bool] = lambda: False,
    tick: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, float], int] | None:
    """The scores over all processes, and how many images could not be read; None where `stop` says so first.

    The model is called without its wrapper for training, so that processes may have different numbers of
    batches.
    """
    model.eval()
    if scorer is None:
        scorer = task.scorer()
    seen = skipped = 0
    share = _share(task, recipe, processes)
    with ExitStack() as stack:
        if reader is None:
            reader = stack.enter_context(closing(val_reader(task, recipe, processes)))
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast(recipe, processes.device))
        for number, batch in enumerate(reader.batches(share)):
            if stop():
                break
            tick(f"{number}/{len(share)}")
            seen, skipped = seen + len(batch), skipped + len(batch.bad)
            if len(batch):
                scorer.update(model, batch.to(processes.device, channels_last=recipe.channels_last))
    (stopped,) = processes.any(stop())
    if stopped:
        return None
    images, unreadable = processes.sums(seen, skipped)
    if images == 0:
        raise RunStoppedError(f"none of the {unreadable:.0f} images to score on can be read.")
    scores = processes.computed_by_first(scorer.share(), scorer.compute)
    if not scores:
        processes.end(RunStoppedError("on the images that could be read there is nothing to find."))
    return scores, int(unreadable)


def evaluate_checkpoint(
    recipe: Recipe,
    checkpoint: Path,
    out: Path | None,
    console: Console,
    *,
    save_detections: Path | None = None,
) -> dict[str, float]:
    """Score weights in a file on the images of a recipe; the first process shows and writes the scores."""
    recipe = recipe.untrained()
    task = recipe.build_task()
    if save_detections is not None:
        kind = _detection_task(task, recipe, "--save-detections").detections_are
        check_destination(save_detections, kind, "--save-detections")
    if out is not None:
        check_destination(out, "file", "--out")
    if not checkpoint.is_file():
        raise SettingsError(f"--checkpoint: there is no file {checkpoint}.")
    task.check(training=False)
    set_up_torch(recipe)
    with joined(recipe.device) as processes:
        model = task.model()
        try:
            load_weights(model, checkpoint, trained=True)
        except ValueError as error:
            raise SettingsError(f"--checkpoint: {error}") from error
        scorer = task.scorer()
        model = to_device(model, recipe, processes.device)
        scored = evaluate(task, model, recipe, processes, scorer=scorer)
        assert scored is not None, "nothing asked it to stop"
        scores, skipped = scored
        if processes.first:
            if save_detections is not None:
                cast(DetectionScorer, scorer).save(save_detections)
            _tell(scores, skipped, {"checkpoint": str(checkpoint)}, out, console)
    return scores


def evaluate_detections(
    recipe: Recipe, detections: Path, out: Path | None, console: Console
) -> dict[str, float]:
    """Score a file of detections, of any program, on the images of a recipe."""
    recipe = recipe.untrained()
    task = _detection_task(recipe.build_task(), recipe, "--detections")
    if out is not None:
        check_destination(out, "file", "--out")
    if not (detections.is_dir() if task.detections_are == "folder" else detections.is_file()):
        raise SettingsError(f"--detections: there is no {task.detections_are} {detections}.")
    task.check(training=False)
    scores = task.score_detections(task.read_detections(detections))
    # Others that torchrun has started would say and write the same.
    if os.environ.get("RANK", "0") == "0":
        _tell(scores, 0, {"detections": str(detections)}, out, console)
    return scores


def _detection_task(task: Task, recipe: Recipe, option: str) -> DetectionTask:
    if not isinstance(task, DetectionTask):
        raise SettingsError(f"{option}: {recipe.task} finds no boxes, so there are no detections.")
    return task


def _tell(
    scores: Mapping[str, float], skipped: int, source: Mapping[str, str], out: Path | None, console: Console
) -> None:
    width = max(8, *map(len, scores))
    for name, score in scores.items():
        console.print(f"{name:>{width}} {score:.3f}", highlight=False)
    if skipped:
        console.print(f"{skipped} unreadable images were skipped.", highlight=False)
    if out is not None:
        write_atomically(out, json.dumps({**source, **scores, "skipped": skipped}, indent=1) + "\n")


def val_reader(task: Task, recipe: Recipe, processes: Processes) -> Reader:
    """What reads the images to score on."""
    collate = partial(task.collate, training=False)
    return Reader(task.val_set(), collate, workers=recipe.workers, device=processes.device)


def _share(task: Task, recipe: Recipe, processes: Processes) -> EveryImageOnce:
    batch = recipe.scoring_batch(processes.count)
    images = len(task.val_set())
    return EveryImageOnce(images, batch=batch, rank=processes.rank, processes=processes.count)
