"""The folder of a run: its recipe, its environment, its figures, its checkpoints and weights."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polynl.environment import environment
from polynl.errors import SettingsError, begun_otherwise, occupied
from polynl.files import write_atomically
from polynl.train.checkpoint import BEST, BEST_WEIGHTS, DAMAGED, FRESH, LAST, LAST_WEIGHTS, PREVIOUS
from polynl.train.curves import Curves
from polynl.train.processes import Processes
from polynl.train.recipe import Recipe
from polynl.train.recipe_file import recipe_of, to_yaml
from polynl.train.recipe_yaml import read_yaml

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
