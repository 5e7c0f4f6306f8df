"""`polynl predict`: what a trained model sees in images, as pictures and in files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn

from polynl.data.images import UnreadableImageError, check_originals_stay, image_files, names_apart
from polynl.errors import RunStoppedError, SettingsError
from polynl.files import output_folder
from polynl.predict.classes import ClassPredictor
from polynl.predict.detections import DetectionPredictor
from polynl.tasks.base import DetectionTask, Task
from polynl.train.processes import autocast, join_processes, set_up_torch
from polynl.train.run_folder import find_trained

OPTIONS = ("checkpoint", "out", "threshold", "top", "labels")


class Predictor(Protocol):
    """Collects a model's predictions, image by image."""

    def pictures(self, names: Sequence[str]) -> list[Path]:
        """The pictures that will be written for images of these names."""

    def read(self, path: Path) -> Tensor:
        """The uint8 image (3, h, w) in a file, or an UnreadableImageError."""

    def add(self, model: nn.Module, path: Path, name: str, image: Tensor) -> str:
        """Predict for an image on the model's device; returns the prediction in words."""

    def save(self) -> str:
        """Write the files; returns what was written, in words."""

    @property
    def content(self) -> dict[str, Any]:
        """What the JSON file contains."""


def run_predict(
    paths: Sequence[Path],
    checkpoint: Path,
    out: Path,
    console: Console,
    *,
    recipe: str | None = None,
    keys: Sequence[str] = (),
    threshold: float | None = None,
    top: int | None = None,
    labels: Path | None = None,
) -> dict[str, Any]:
    """Predict for images, draw and save the predictions; returns the content of the JSON file."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError("predict runs in one process: start it without torchrun.")
    images = image_files(paths)
    names = names_apart(images)
    trained = find_trained(checkpoint, recipe, keys, OPTIONS, labels=labels)
    settings = trained.recipe
    predictor = _predictor(trained.task, out, threshold=threshold, top=top)
    check_originals_stay(images, predictor.pictures(names))
    set_up_torch(settings)
    unreadable = 0
    with join_processes(settings.device) as processes, output_folder(out):
        model = trained.load(processes.device)
        for path, name in zip(images, names, strict=True):
            try:
                image = predictor.read(path)
            except UnreadableImageError as error:
                _print(console, f"skipped: {error}")
                unreadable += 1
                continue
            with torch.no_grad(), autocast(settings, processes.device):
                said = predictor.add(model, path, name, image.to(processes.device))
            _print(console, f"{path}: {said}")
        if unreadable < len(images):  # or the files of earlier predictions would be lost for nothing
            _print(console, f"{predictor.save()} in {out}.")
    if unreadable:
        raise RunStoppedError(f"{unreadable} of {len(images)} images could not be read, see above.")
    return predictor.content


def _predictor(task: Task, out: Path, *, threshold: float | None, top: int | None) -> Predictor:
    if isinstance(task, DetectionTask):
        if top is not None:
            raise SettingsError(f"--top {top} is for classifiers; use --threshold for detectors.")
        return DetectionPredictor(task, out, threshold=0.5 if threshold is None else threshold)
    if threshold is not None:
        raise SettingsError(f"--threshold {threshold:g} is for detectors; use --top for classifiers.")
    return ClassPredictor(task, out, top=5 if top is None else top)


def _print(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
