"""The folder of a run: its recipe, environment, metrics, curves and checkpoints, and the model in it."""

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
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from polynl.environment import environment
from polynl.errors import SettingsError, begun_otherwise, occupied
from polynl.files import write_atomically
from polynl.models.weights import load_weights
from polynl.tasks.base import Task
from polynl.tasks.registry import task_class
from polynl.train.checkpoint import BEST, BEST_WEIGHTS, DAMAGED, FRESH, LAST, LAST_WEIGHTS, PREVIOUS
from polynl.train.config import Recipe
from polynl.train.processes import Processes, to_device
from polynl.train.recipe_file import load_recipe, read_yaml, recipe_of, to_yaml

RECIPE, ENVIRONMENT, METRICS, TENSORBOARD = "recipe.yaml", "environment.json", "metrics", "tensorboard"
LABELS = "labels.json"
LOCK, LAUNCH = ".lock", ".torchrun"
SAVED = (LAST, PREVIOUS, BEST, FRESH, DAMAGED, LAST_WEIGHTS, BEST_WEIGHTS)
FILES = (*SAVED, f"{METRICS}.csv", f"{METRICS}.json", LAUNCH, LABELS, ENVIRONMENT, RECIPE)
# Keys that change how fast a run is or what it tells, and not what it learns.
HARMLESS = {
    "workers",
    "threads",
    "device",
    "checkpoint_every",
    "val_batch",
    "data.root",
    "data.ground_truth",
    "data.on_bad_image",
}


class RunFolder:
    """One run's folder; only the first process has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resumed = False
        """Whether the run in it goes on."""
        self._lock: Any = None
        self._curves = Curves(path / TENSORBOARD)

    def open(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """See whether a run can begin here or go on; until `close`, others are kept out."""
        begun = self._begun
        if begun and not resume and not overwrite:
            raise occupied(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise SettingsError(f"--out: no run can be kept in {self.path}: {error.strerror}.") from None
        self.resumed = begun and resume
        if self.resumed:
            self.check_same(recipe)

    @property
    def _begun(self) -> bool:
        """Whether there is something to lose: a checkpoint, or a recipe that was not written by a run."""
        saved = any((self.path / name).exists() for name in (LAST, PREVIOUS, BEST))
        return saved or ((self.path / RECIPE).exists() and not (self.path / ENVIRONMENT).exists())

    def begun_by(self, launch: str) -> bool:
        """Whether the run here was begun or gone on with by this torchrun."""
        file = self.path / LAUNCH
        return file.is_file() and file.read_text() == launch

    def begin(self, recipe: Recipe, processes: Processes, labels: Mapping[int, str]) -> None:
        """Write down what is run where; a run that is replaced goes now, and not before all else is built."""
        self._clear(half_written=True)
        if not self.resumed:
            self._clear()
            write_atomically(self.path / LABELS, json.dumps(labels, indent=1, ensure_ascii=False) + "\n")
            write_atomically(self.path / RECIPE, to_yaml(recipe))
        self._write_environment(processes, recipe.seed)
        if processes.launch:
            write_atomically(self.path / LAUNCH, processes.launch)

    def _write_environment(self, processes: Processes, seed: int) -> None:
        """Versions, machine, seed and command; the command is that of this start, not of earlier ones."""
        content = {
            "command": shlex.join(["polynl", *sys.argv[1:]]),
            "seed": seed,
            "processes": processes.count,
            "device": processes.device.type,
            **environment(processes.device.type),
        }
        write_atomically(self.path / ENVIRONMENT, json.dumps(content, indent=1) + "\n")

    def write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One row an epoch, as CSV and as JSON."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_atomically(self.path / f"{METRICS}.csv", text.getvalue())
        write_atomically(self.path / f"{METRICS}.json", json.dumps(rows, indent=1) + "\n")

    def log(self, figures: Mapping[str, float], step: int) -> str | None:
        """A point of each curve in TensorBoard; gives what is wrong when that cannot be written any more."""
        return self._curves.add(figures, step)

    def close(self) -> None:
        """Write out what TensorBoard has not got yet, and let others in."""
        self._curves.close()
        if self._lock is not None:
            self._lock.close()

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self._lock = open(self.path / LOCK, "w")  # noqa: SIM115
        try:
            # The system lets go of it when the process dies, however it dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SettingsError(
                f"another process is training in {self.path}: wait for it or stop it."
            ) from None
        # Processes that read images are forked with it, and outlive a killed one by some seconds.
        os.register_at_fork(after_in_child=self._lock.close)

    def check_same(self, recipe: Recipe) -> None:
        """Raise a SettingsError where the run in the folder was begun with a recipe that learns otherwise."""
        file = self.path / RECIPE
        try:
            content = read_yaml(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{file} cannot be read: {error}") from None
        begun_with = recipe_of(content, str(file))
        old, new = (_flat(r.model_dump(mode="json")) for r in (begun_with, recipe))
        keys = [key for key in dict.fromkeys([*old, *new]) if key not in HARMLESS]
        changed = [key for key in keys if old.get(key) != new.get(key)]
        if changed:
            lines = [f"{key}: {old.get(key)} → {new.get(key)}" for key in changed]
            raise begun_otherwise(self.path, "another recipe", lines)

    def _clear(self, *, half_written: bool = False) -> None:
        """Remove the run, if there is one, or only what a killed process left half written."""
        if not (self.path / RECIPE).exists():
            return
        for name in FILES:
            (self.path / (f".{name}.tmp" if half_written else name)).unlink(missing_ok=True)
        if not half_written:
            shutil.rmtree(self.path / TENSORBOARD, ignore_errors=True)


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


class Curves:
    """Points that a thread of TensorBoard's writes; where it cannot, the curves end and the run goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._ended = False
        self._hook = threading.excepthook

    def add(self, figures: Mapping[str, float], step: int) -> str | None:
        """A point of each curve; gives what is wrong when they end."""
        if self._ended:
            return None
        try:
            if self._writer is None:
                self._hook, threading.excepthook = threading.excepthook, self._except_hook
                # What a killed run wrote after its last checkpoint comes again, and is hidden by this.
                self._writer = SummaryWriter(str(self._folder), purge_step=step)
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._ended = True
            return f"TensorBoard's curves end at step {step}: {error.strerror}."
        return None

    def close(self) -> None:
        """Write out what is not written yet."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
        if threading.excepthook == self._except_hook:
            threading.excepthook = self._hook

    def _except_hook(self, arguments: threading.ExceptHookArgs) -> None:
        """Keep quiet about what `add` gets as well: the thread's traceback would say it first and worse."""
        if not isinstance(arguments.exc_value, OSError):
            self._hook(arguments)


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
