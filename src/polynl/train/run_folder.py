"""The folder of a run: its recipe, its environment, its figures, its checkpoints and weights."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter

from polynl.environment import environment
from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.train.checkpoint import BEST, LAST, PREVIOUS
from polynl.train.recipe import Recipe
from polynl.train.recipe_file import recipe_of, to_yaml

RECIPE, ENVIRONMENT, METRICS, TENSORBOARD = "recipe.yaml", "environment.json", "metrics", "tensorboard"
# Keys that change how fast a run is or what it tells, and not what it learns.
HARMLESS = {"workers", "threads", "device", "checkpoint_every", "val_batch", "data.root"}


class RunFolder:
    """One run's folder; only the first process has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None
        self._events: SummaryWriter | None = None

    def open(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Begin a run in the folder or go on with the one in it; until `close`, others are kept out."""
        begun = (self.path / RECIPE).exists()
        if begun and not resume and not overwrite:
            raise SettingsError(
                f"{self.path} holds a run already: go on with it by --resume, replace it by --overwrite, "
                "or choose another --out."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if begun and resume:
            self._check_same(recipe)
        elif begun:
            self._clear()
        if not (begun and resume):
            write_atomically(self.path / RECIPE, to_yaml(recipe))

    def write_environment(self, device: str, processes: int, seed: int) -> None:
        """Versions, machine, seed and command; the command is that of this start, not of earlier ones."""
        content = {
            "command": " ".join(["polynl", *sys.argv[1:]]),
            "seed": seed,
            "processes": processes,
            "device": device,
            **environment(device),
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

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """A point of each curve in TensorBoard."""
        if self._events is None:
            # What a killed run wrote after its last checkpoint comes again, and is hidden by this.
            self._events = SummaryWriter(str(self.path / TENSORBOARD), purge_step=step)
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)

    def close_log(self) -> None:
        """Write out what TensorBoard has not got yet."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def close(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.close()

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115
        try:
            # The system lets go of it when the process dies, however it dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise SettingsError(
                f"another process is training in {self.path}: wait for it or stop it."
            ) from None

    def _check_same(self, recipe: Recipe) -> None:
        file = self.path / RECIPE
        try:
            begun_with = recipe_of(yaml.safe_load(file.read_text()), str(file))
        except (OSError, yaml.YAMLError, AttributeError) as error:
            raise SettingsError(f"{file} cannot be read: {error}") from None
        old, new = (_flat(r.model_dump(mode="json")) for r in (begun_with, recipe))
        keys = [key for key in dict.fromkeys([*old, *new]) if key not in HARMLESS]
        changed = [key for key in keys if old.get(key) != new.get(key)]
        if changed:
            lines = "\n".join(f"  {key}: {old.get(key)} → {new.get(key)}" for key in changed)
            raise SettingsError(f"{self.path} was begun with another recipe, and one run has one:\n{lines}")

    def _clear(self) -> None:
        for name in (LAST, PREVIOUS, BEST):
            (self.path / name).unlink(missing_ok=True)
            (self.path / name).with_suffix(".safetensors").unlink(missing_ok=True)
        for name in (ENVIRONMENT, f"{METRICS}.csv", f"{METRICS}.json"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / TENSORBOARD, ignore_errors=True)


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
