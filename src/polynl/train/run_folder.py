"""The folder of a run: recipe, environment, metrics, TensorBoard curves, checkpoints and trained model."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.data.labels import read_labels
from polynl.environment import environment
from polynl.errors import SettingsError, changed_run_error, existing_run_error
from polynl.files import write_atomically
from polynl.insertion import inserted
from polynl.models.about import About, about_file
from polynl.models.libraries import FACTORY
from polynl.models.weights import MisfitError, load_weights
from polynl.tasks.base import Task
from polynl.tasks.config import FilesConfig
from polynl.tasks.outcomes import OUTCOMES
from polynl.tasks.registry import task_class
from polynl.train.checkpoint import (
    BEST,
    BEST_WEIGHTS,
    DAMAGED,
    FRESH,
    LAST,
    LAST_WEIGHTS,
    PREVIOUS,
    SHARED_WEIGHTS,
)
from polynl.train.config import Recipe, neutral_keys
from polynl.train.processes import Processes, to_device
from polynl.train.recipe_file import load_recipe, parse_recipe, runs_in, to_yaml

RECIPE, ENVIRONMENT, METRICS, TENSORBOARD = "recipe.yaml", "environment.json", "metrics", "tensorboard"
LABELS = "labels.json"
WEIGHTS_SUFFIXES = (".pt", ".pth", ".safetensors")
LOCK, LAUNCH = ".lock", ".torchrun"
SAVED = (LAST, PREVIOUS, BEST, FRESH, DAMAGED, LAST_WEIGHTS, BEST_WEIGHTS)
FILES = (*SAVED, OUTCOMES, f"{METRICS}.csv", f"{METRICS}.json", LAUNCH, LABELS, ENVIRONMENT, RECIPE)


def default_folder(file: Path, recipe: Recipe) -> Path:
    """The folder of a run without --out: runs/<recipe>/<block>-<placement>.

    The recipe.yaml in such a folder, whatever its block, counts as the recipe that the folder is named after.
    """
    name, block = file.stem, recipe.model.block
    if file.name == RECIPE:
        folder = file.resolve().parent
        is_default = folder.name.partition("-")[0] in (NO_BLOCK, *BLOCKS)
        name = folder.parent.name if is_default else folder.name
    placement = recipe.model.placement
    places = placement if isinstance(placement, str) else "+".join(placement)
    return Path("runs", name, NO_BLOCK if block is None else f"{block}-{places}")


class RunFolder:
    """The folder of one run; only the main process opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resumed = False
        """Whether the run in the folder is resumed."""
        self._lock: Any = None
        self.curves = Curves(path / TENSORBOARD)

    def open(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Check that a run can start or resume here, and lock the folder until `close`."""
        self.check_place(recipe)
        exists = self._exists
        if exists and not resume and not overwrite:
            raise existing_run_error(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise SettingsError(f"--out: {self.path} cannot be used as a folder: {error.strerror}.") from None
        self.resumed = exists and resume
        if self.resumed:
            self.check_unchanged(recipe)

    def check_place(self, recipe: Recipe) -> None:
        """Raise a SettingsError if the run would be written among the images that it reads."""
        folder = recipe.data.holding(self.path) if isinstance(recipe.data, FilesConfig) else None
        if folder is not None:
            raise SettingsError(
                f"--out: {self.path} is in {folder}, which holds the images: choose a folder elsewhere."
            )

    @property
    def _exists(self) -> bool:
        """Whether there is something to lose: a checkpoint, or a recipe.yaml that no run has written."""
        saved = any((self.path / name).exists() for name in (LAST, PREVIOUS, BEST))
        return saved or ((self.path / RECIPE).exists() and not (self.path / ENVIRONMENT).exists())

    def started_by(self, launch: str) -> bool:
        """Whether this torchrun started or resumed the run here."""
        file = self.path / LAUNCH
        return file.is_file() and file.read_text("utf-8") == launch

    def start(self, recipe: Recipe, processes: Processes, labels: Mapping[int, str]) -> None:
        """Write recipe, labels and environment; a run to replace is deleted only now, after all checks."""
        self._clear(half_written=True)
        if not self.resumed:
            self._clear()
            write_atomically(self.path / LABELS, json.dumps(labels, indent=1, ensure_ascii=False) + "\n")
            write_atomically(self.path / RECIPE, to_yaml(recipe))
        # Of this start, not of earlier ones.
        content = {
            "command": shlex.join(["polynl", *sys.argv[1:]]),
            "seed": recipe.seed,
            "processes": processes.count,
            "device": processes.device.type,
            **environment(processes.device.type),
        }
        write_atomically(self.path / ENVIRONMENT, json.dumps(content, indent=1) + "\n")
        if processes.launch:
            write_atomically(self.path / LAUNCH, processes.launch)

    def write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write one row per epoch, as CSV and as JSON."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_atomically(self.path / f"{METRICS}.csv", text.getvalue())
        write_atomically(self.path / f"{METRICS}.json", json.dumps(rows, indent=1) + "\n")

    def close(self) -> None:
        """Flush the curves and unlock the folder."""
        self.curves.close()
        if self._lock is not None:
            self._lock.close()

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self._lock = open(self.path / LOCK, "wb")  # noqa: SIM115
        try:
            # The system releases it when the process dies, however it dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SettingsError(
                f"another process is training in {self.path}: wait for it or stop it."
            ) from None
        # Data loading workers inherit it by fork, and outlive a killed process by some seconds.
        os.register_at_fork(after_in_child=self._lock.close)

    def check_unchanged(self, recipe: Recipe) -> None:
        """Raise a SettingsError if the run here was started with a recipe that gives other results."""
        try:
            original = load_recipe(self.path / RECIPE)
        except SettingsError as error:
            raise SettingsError(
                f"{error}\nThe run cannot be resumed without it. To write it again, start the command in "
                f"{self.path / ENVIRONMENT} with another --out, and copy the {RECIPE} from there; or replace "
                "the run with --overwrite."
            ) from None
        if changed := differing_keys(original, recipe):
            lines = [f"{key}: {old} → {new}" for key, (old, new) in changed.items()]
            raise changed_run_error(self.path, "another recipe", lines)

    def check_data(self, recipe: Recipe) -> None:
        """Raise a SettingsError if the run here was started with a data folder of another name."""
        old, new = (getattr(one.data, "root", None) for one in (load_recipe(self.path / RECIPE), recipe))
        if old is not None and new is not None and old.resolve().name != new.resolve().name:
            raise changed_run_error(self.path, "other data", [f"data.root: {old} → {new}"])

    def _clear(self, *, half_written: bool = False) -> None:
        """Delete the run, if there is one, or only the temporary files of a killed process."""
        if not (self._exists or (self.path / RECIPE).exists()):
            return
        for name in FILES:
            (self.path / (f".{name}.tmp" if half_written else name)).unlink(missing_ok=True)
        if not half_written:
            shutil.rmtree(self.path / TENSORBOARD, ignore_errors=True)


def differing_keys(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys of two recipes that give other results, with the values of both."""
    old, new = (_flat(recipe.model_dump(mode="json")) for recipe in (one, other))
    neutral = neutral_keys(one) | neutral_keys(other)
    changed = [key for key in old | new if key not in neutral and old.get(key) != new.get(key)]
    return {key: (old.get(key), new.get(key)) for key in changed}


def unequal_training(one: Recipe, other: Recipe) -> list[str]:
    """The keys, beside the block and the seed, in which two trainings differ."""
    about_the_block = ("seed", "model.block", "model.options", "model.placement")
    found = [key for key in differing_keys(one, other) if not key.startswith(about_the_block)]
    # The path of a folder says nothing of the images in it, but another name may.
    roots = {Path(root).name for recipe in (one, other) if (root := getattr(recipe.data, "root", None))}
    return [*found, "data.root"] if len(roots) > 1 else found


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


class Curves:
    """TensorBoard curves, written by its own thread; if that fails, the curves end and the run continues."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._ended = False
        self._hook = threading.excepthook

    def add(self, figures: Mapping[str, float], step: int) -> str | None:
        """Add a point to each curve; returns a message if they end here."""
        if self._ended:
            return None
        try:
            if self._writer is None:
                self._hook, threading.excepthook = threading.excepthook, self._except_hook
                # Hides points that a killed run wrote after its last checkpoint: they are written again.
                self._writer = SummaryWriter(str(self._folder), purge_step=step)
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        except (OSError, UnicodeError) as error:  # TensorBoard needs names of folders in UTF-8
            self._ended = True
            return f"the TensorBoard curves end at step {step}: {getattr(error, 'strerror', error)}."
        return None

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
        if threading.excepthook == self._except_hook:
            threading.excepthook = self._hook

    def _except_hook(self, arguments: threading.ExceptHookArgs) -> None:
        """Hide an OSError of the writing thread, which `add` gets and reports too, without a traceback."""
        if not isinstance(arguments.exc_value, OSError):
            self._hook(arguments)


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint with its recipe and its task; `load` builds the model."""

    checkpoint: Path
    recipe: Recipe
    task: Task
    about: About | None = None
    """What the file says about its network, if it does."""

    def load(self, device: torch.device) -> nn.Module:
        """The model with the weights of the checkpoint, on the device and in eval mode."""
        model = self.task.model()
        try:
            load_weights(model, self.checkpoint, trained=True)
        except MisfitError as error:
            blocks = tuple(f"{name}." for name in inserted(model))
            if all(key.startswith(blocks) for key in error.keys):
                remedy = "If it was trained without this block, set --model.block none"
            else:
                remedy = (
                    "Check that task, block and classes are those it was trained with: "
                    f"{RECIPE} and {LABELS} next to a checkpoint say so"
                )
            raise SettingsError(f"--checkpoint: {error}. {remedy}.") from error
        except ValueError as error:
            raise SettingsError(f"--checkpoint: {error}.") from error
        return to_device(model, self.recipe, device).eval()


def checkpoint_in(run: Path) -> Path:
    """The weights with the best score in the folder of a run, or its last checkpoint before there are any.

    In a folder of `save_pretrained`, the weights.
    """
    for name in (BEST_WEIGHTS, LAST, SHARED_WEIGHTS):
        if (run / name).is_file():
            return run / name
    raise SettingsError(f"there is no checkpoint in the folder {run}.{runs_in(run)}")


def find_run(given: str) -> Path | None:
    """The path of a run's folder, of a shared one or of weights; None if it is none of these."""
    path = Path(given)
    is_folder = any((path / name).is_file() for name in (RECIPE, SHARED_WEIGHTS))
    return path if is_folder or _is_weights(path) else None


def recipe_of_run(
    run: Path, keys: Sequence[str] = (), options: Sequence[str] = (), *, otherwise: str | None = None
) -> Recipe:
    """The recipe.yaml of what `find_run` finds, or the recipe in its weights.

    For `keys` and `options` see `load_recipe`. `otherwise`: what else to do if there is no recipe.
    """
    file = (run.parent if _is_weights(run) else run) / RECIPE
    if file.is_file():
        return load_recipe(file, keys, options)
    weights = run if _is_weights(run) else run / SHARED_WEIGHTS
    about = _about(weights)
    if about is None or not about.recipe:
        if otherwise is None:
            otherwise = f", or name that recipe, and then --checkpoint {weights}"
        raise SettingsError(
            f"there is no {RECIPE} next to {weights}: copy the one it was trained with there{otherwise}."
        )
    return _recorded_recipe(weights, about, keys, options, allow_import=False)


def _is_weights(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in WEIGHTS_SUFFIXES


def find_trained(
    checkpoint: Path,
    recipe: str | None = None,
    keys: Sequence[str] = (),
    options: Sequence[str] = (),
    *,
    labels: Path | None = None,
    allow_import: bool = False,
) -> TrainedModel:
    """A checkpoint with its recipe; for `keys` and `options` see `load_recipe`.

    Of the folder of a run, it is the best checkpoint. The recipe is the one given, the recipe.yaml next to
    the checkpoint, or the one in it. The task has the labels in the file `labels` (default: those that the
    run has saved). `allow_import`: a recipe in a checkpoint may name a function to import, which builds the
    network.
    """
    if checkpoint.is_dir():
        checkpoint = checkpoint_in(checkpoint)
    if not checkpoint.is_file():
        raise SettingsError(f"--checkpoint: no such file: {checkpoint}.")
    about, file = _about(checkpoint), checkpoint.parent / RECIPE
    if recipe is None and not file.is_file():
        loaded = _recorded_recipe(checkpoint, about, keys, options, allow_import=allow_import)
    else:
        loaded = load_recipe(file if recipe is None else recipe, keys, options)
    names = _saved_labels(checkpoint, about, loaded)
    if labels is not None:
        names = _named_anew(names, labels)
    task = loaded.without_weights().build_task(names)
    return TrainedModel(checkpoint, loaded, task, about)


def _about(checkpoint: Path) -> About | None:
    if checkpoint.suffix != ".safetensors":
        return None
    try:
        return about_file(checkpoint)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--checkpoint: {error}.") from error


def _recorded_recipe(
    checkpoint: Path, about: About | None, keys: Sequence[str], options: Sequence[str], *, allow_import: bool
) -> Recipe:
    """The recipe in a checkpoint; files from elsewhere do not decide what is imported."""
    if about is None or not about.recipe:
        raise SettingsError(
            f"there is no {RECIPE} next to {checkpoint}: name the recipe that it was trained with, "
            "such as --recipe imagenet --model.block none for torchvision's ResNet-50, or coco for its "
            "Mask R-CNN."
        )
    recipe = parse_recipe(about.recipe, f"the recipe in {checkpoint}", options, keys)
    if not allow_import and FACTORY.fullmatch(recipe.model.arch):
        raise SettingsError(
            f"the network in {checkpoint} is built by {recipe.model.arch}, which would be imported and "
            f"called. If you trust it, put its {RECIPE} next to it, or use polynl.load_run(…, "
            "allow_import=True)."
        )
    return recipe


def _saved_labels(checkpoint: Path, about: About | None, recipe: Recipe) -> dict[int, str] | None:
    """The labels saved by the run, or those of published weights, or None for the task's own."""
    file = checkpoint.parent / LABELS
    if file.is_file():
        return read_labels(file)
    if about is not None and about.labels:
        return dict(about.labels)
    return task_class(recipe.task).pretrained_labels()


def _named_anew(saved: Mapping[int, str] | None, file: Path) -> dict[int, str]:
    """The names in a file, for as many classes as the run has saved."""
    names = read_labels(file, "--labels")
    if saved is not None and len(names) != len(saved):
        raise SettingsError(f"--labels: {file} names {len(names)} classes; the network has {len(saved)}.")
    if saved is not None and (unnamed := saved.keys() - names.keys()):
        raise SettingsError(f"--labels: {file} has no name for the network's class {min(unnamed)}.")
    return names
