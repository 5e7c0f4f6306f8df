"""Evaluation: scores of a model or of saved detections on the validation images of a recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset

from polynl.data.images import Unreadable
from polynl.errors import RunStoppedError, SettingsError
from polynl.files import check_destination, write_atomically
from polynl.results.formats import plural
from polynl.tasks.base import Batch, DetectionScorer, DetectionTask, Images, Scorer, Task
from polynl.train.config import Recipe
from polynl.train.failures import failures_explained
from polynl.train.loading import Reader, eval_batches
from polynl.train.processes import Processes, autocast, join_processes, set_up_torch
from polynl.train.run_folder import TrainedModel


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
    """The scores over all processes and the number of unreadable images; None if `stop` returns True first.

    Takes the model without its DDP wrapper, so that processes may have different numbers of batches.
    """
    model.eval()
    if scorer is None:
        scorer = task.scorer()
    seen = skipped = 0
    batches = eval_batches(
        len(task.val_set()),
        batch=recipe.scoring_batch(processes.count),
        rank=processes.rank,
        processes=processes.count,
    )
    with ExitStack() as stack:
        if reader is None:
            reader = stack.enter_context(closing(val_reader(task, recipe, processes)))
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast(recipe, processes.device))
        for number, batch in enumerate(reader.batches(batches)):
            if stop():
                break
            tick(f"{number}/{len(batches)}")
            seen, skipped = seen + len(batch), skipped + len(batch.bad)
            if len(batch):
                scorer.update(model, batch.to(processes.device, channels_last=recipe.channels_last))
    (stopped,) = processes.any(stop())
    if stopped:
        return None
    images, unreadable = processes.sums(seen, skipped)
    if images == 0:
        raise RunStoppedError(f"none of the {unreadable:.0f} validation images can be read.")
    scores = processes.compute_on_main(scorer.share(), scorer.compute)
    if not scores:
        processes.exit_all(RunStoppedError("the validation images that can be read contain no objects."))
    return scores, int(unreadable)


def evaluate_checkpoint(
    recipe: Recipe,
    checkpoint: Path,
    out: Path | None,
    console: Console,
    *,
    save_detections: Path | None = None,
) -> dict[str, float]:
    """Score a checkpoint on a recipe's validation images; the main process prints and writes the scores."""
    recipe = recipe.without_weights()
    task = recipe.build_task()
    if save_detections is not None:
        kind = _detection_task(task, "--save-detections").detections_are
        check_destination(save_detections, kind, "--save-detections")
    if out is not None:
        check_destination(out, "file", "--out")
    if not checkpoint.is_file():
        raise SettingsError(f"--checkpoint: no such file: {checkpoint}.")
    task.check(training=False)
    set_up_torch(recipe)
    with join_processes(recipe.device) as processes:
        model = TrainedModel(checkpoint, recipe, task).load(processes.device)
        scorer, reader = task.scorer(), val_reader(task, recipe, processes)
        with failures_explained(recipe, processes, [reader]):
            scored = evaluate(task, model, recipe, processes, reader=reader, scorer=scorer)
        assert scored is not None, "nothing requests a stop"
        scores, skipped = scored
        if processes.is_main:
            if save_detections is not None:
                cast(DetectionScorer, scorer).save(save_detections)
            _report(scores, skipped, {"checkpoint": str(checkpoint)}, out, console)
    return scores


def evaluate_detections(
    recipe: Recipe, detections: Path, out: Path | None, console: Console
) -> dict[str, float]:
    """Score a file of detections, from any program, on the validation images of a recipe."""
    recipe = recipe.without_weights()
    task = _detection_task(recipe.build_task(), "--detections")
    if out is not None:
        check_destination(out, "file", "--out")
    if not (detections.is_dir() if task.detections_are == "folder" else detections.is_file()):
        raise SettingsError(f"--detections: no such {task.detections_are}: {detections}.")
    task.check(training=False)
    scores = task.score_detections(task.read_detections(detections))
    # Under torchrun, the other processes would print and write the same.
    if os.environ.get("RANK", "0") == "0":
        _report(scores, 0, {"detections": str(detections)}, out, console)
    return scores


def _detection_task(task: Task, option: str) -> DetectionTask:
    if not isinstance(task, DetectionTask):
        raise SettingsError(f"{option}: {task.name} is not a detection task.")
    return task


def _report(
    scores: Mapping[str, float], skipped: int, source: Mapping[str, str], out: Path | None, console: Console
) -> None:
    width = max(8, *map(len, scores))
    for name, score in scores.items():
        console.print(f"{name:>{width}} {score:.3f}", highlight=False)
    if skipped:
        console.print(f"Skipped {plural(skipped, 'unreadable image')}.", highlight=False)
    if out is not None:
        write_atomically(out, json.dumps({**source, **scores, "skipped": skipped}, indent=1) + "\n")


def val_reader(task: Task, recipe: Recipe, processes: Processes) -> Reader:
    """The reader of the validation images, which numbers them."""
    collate = partial(_numbered_batch, task)
    return Reader(Numbered(task.val_set()), collate, workers=recipe.workers, device=processes.device)


class Numbered(Dataset[Any]):
    """A data set whose samples come with their numbers."""

    def __init__(self, dataset: Images) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._dataset[index]


def _numbered_batch(task: Task, samples: Sequence[tuple[int, Any]]) -> Batch:
    numbers = tuple(number for number, sample in samples if not isinstance(sample, Unreadable))
    return replace(task.collate([sample for _, sample in samples], training=False), numbers=numbers)
