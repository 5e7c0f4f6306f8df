"""The outcomes of a trained network: those that its run has saved, or scored now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from polynl.errors import SettingsError
from polynl.results.evidence import load_outcomes
from polynl.tasks.outcomes import OUTCOMES, Outcomes
from polynl.tasks.registry import task_class
from polynl.train.checkpoint import LAST_WEIGHTS, SHARED_WEIGHTS
from polynl.train.config import Recipe
from polynl.train.evaluation import evaluate, val_reader
from polynl.train.failures import failures_explained
from polynl.train.processes import join_processes, set_up_torch
from polynl.train.recipe_file import runs_in
from polynl.train.run_folder import RECIPE, WEIGHTS_SUFFIXES, find_run, find_trained, recipe_of_run


@dataclass(frozen=True)
class Scored:
    """The recipe that a network was trained with, and its outcomes on validation images."""

    recipe: Recipe
    outcomes: Outcomes


def find_outcomes(path: Path, console: Console, keys: Sequence[str] = ()) -> Scored:
    """The outcomes of a run's last epoch, from its folder, or of a checkpoint, which is scored now.

    So are the weights of a shared network, and the last weights of a run of an older version, which has saved
    no outcomes. With `keys`, which override those of the recipe, all are.
    """
    recipe, saved = trained_recipe(path), path / OUTCOMES
    if (path / SHARED_WEIGHTS).is_file():
        path = path / SHARED_WEIGHTS
    if saved.is_file() and not keys:
        return Scored(recipe, load_outcomes(saved, task_class(recipe.task)))
    weights = path / LAST_WEIGHTS if path.is_dir() else path
    if not weights.is_file():
        if saved.is_file():
            raise SettingsError(
                f"{path} has no {LAST_WEIGHTS} to score anew with {' '.join(keys)}. Without keys, the scores "
                "that it has saved are compared."
            )
        raise SettingsError(
            f"{path}: this training has not finished. Finish it with --resume, or name one of its "
            "checkpoints."
        )
    console.print(escape(f"Scoring {weights} …"), highlight=False, soft_wrap=True)
    return Scored(recipe, _score(weights, keys))


def trained_recipe(path: Path) -> Recipe:
    """The recipe that a run or a checkpoint was trained with."""
    if not path.exists():
        raise SettingsError(f"{path}: no such run or checkpoint.")
    if find_run(str(path)) is None:
        if path.is_dir():
            raise SettingsError(f"{path} is not the folder of a run: it has no {RECIPE}.{runs_in(path)}")
        kinds = ", ".join(WEIGHTS_SUFFIXES)
        raise SettingsError(f"{path} is neither the folder of a run nor a checkpoint ({kinds}).")
    return recipe_of_run(path, otherwise="")


def _score(checkpoint: Path, keys: Sequence[str]) -> Outcomes:
    """The outcomes of a checkpoint on the validation images of its recipe, in which `keys` are overridden."""
    trained = find_trained(checkpoint, keys=keys)
    recipe, task = trained.recipe, trained.task
    task.check(training=False)
    set_up_torch(recipe)
    with join_processes("auto" if torch.cuda.is_available() else "cpu") as processes:
        model, scorer = trained.load(processes.device), task.scorer()
        reader = val_reader(task, recipe, processes)
        with failures_explained(recipe, processes, [reader]):
            evaluate(task, model, recipe, processes, reader=reader, scorer=scorer)
    return scorer.outcomes()
