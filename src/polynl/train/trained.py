"""The model in a checkpoint, from what its run has kept beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from polynl.errors import SettingsError
from polynl.models.weights import load_weights
from polynl.tasks.base import Task
from polynl.tasks.registry import task_class
from polynl.train.evaluation import to_device
from polynl.train.recipe import Recipe
from polynl.train.recipe_file import load_recipe
from polynl.train.run_folder import LABELS, RECIPE


def recipe_for(
    checkpoint: Path, recipe: str | None, keys: Sequence[str], options: Sequence[str] = ()
) -> Recipe:
    """The recipe that is named, or else the one beside the checkpoint; `options`: see `load_recipe`."""
    if not checkpoint.is_file():
        raise SettingsError(f"--checkpoint: there is no file {checkpoint}.")
    beside = checkpoint.parent / RECIPE
    if recipe is None and not beside.is_file():
        raise SettingsError(
            f"there is no {RECIPE} beside {checkpoint}: say with --recipe what it was trained by, "
            "coco/resnet50_none for torchvision's Mask R-CNN."
        )
    return load_recipe(beside if recipe is None else recipe, keys, options)


def task_for(checkpoint: Path, recipe: Recipe) -> Task:
    """The recipe's task, with the names of classes that the run has kept."""
    return recipe.untrained().build_task(_labels(checkpoint, recipe))


def model_in(checkpoint: Path, recipe: Recipe, task: Task, device: torch.device) -> nn.Module:
    """The task's model with the weights of a file, in eval mode."""
    model = task.model()
    try:
        load_weights(model, checkpoint, trained=True)
    except ValueError as error:
        raise SettingsError(
            f"--checkpoint: {error}. A run keeps {RECIPE} and {LABELS} beside its checkpoints; keep them so."
        ) from error
    return to_device(model, recipe, device).eval()


def _labels(checkpoint: Path, recipe: Recipe) -> dict[int, str] | None:
    """The names that the run has kept, or those of published weights, or None for the task's own."""
    file = checkpoint.parent / LABELS
    if not file.is_file():
        return task_class(recipe.task).pretrained_labels()
    try:
        return {int(number): str(name) for number, name in json.loads(file.read_text("utf-8")).items()}
    except (ValueError, AttributeError) as error:
        raise SettingsError(f"{file} is no file of names by number: {error}.") from None
