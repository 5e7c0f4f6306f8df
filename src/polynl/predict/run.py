"""`polynl predict`: draw the detections of a trained model on images, and save them as JSON."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from polynl.data.images import (
    UnreadableImageError,
    check_originals_stay,
    image_files,
    names_apart,
    read_for_detector,
)
from polynl.errors import RunStoppedError, SettingsError
from polynl.files import make_folder, write_atomically
from polynl.predict.drawing import draw_detections
from polynl.tasks.base import DetectionTask
from polynl.tasks.detections import Detections
from polynl.train.processes import autocast, join_processes, set_up_torch
from polynl.train.run_folder import find_trained

DETECTIONS = "detections.json"


def run_predict(
    paths: Sequence[Path],
    checkpoint: Path,
    out: Path,
    console: Console,
    *,
    recipe: str | None = None,
    keys: Sequence[str] = (),
    threshold: float = 0.5,
) -> dict[str, Any]:
    """Draw and save the detections in images; returns the content of detections.json, in COCO's format."""
    if not 0 <= threshold <= 1:
        raise SettingsError(f"--threshold {threshold:g}: expected a number from 0 to 1.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError("predict runs in one process: start it without torchrun.")
    images = image_files(paths)
    pictures = [out / f"{name}.png" for name in names_apart(images)]
    check_originals_stay(images, pictures)
    trained = find_trained(checkpoint, recipe, keys, ("checkpoint", "out", "threshold"))
    settings, task = trained.recipe, trained.task
    if not isinstance(task, DetectionTask):
        raise SettingsError(f"predict needs a detector; the recipe's task is {settings.task}.")
    set_up_torch(settings)
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    unreadable = 0
    with join_processes(settings.device) as processes:
        model = trained.load(processes.device)
        make_folder(out)
        names = task.labels()
        content["categories"] = [{"id": label, "name": name} for label, name in names.items()]
        for path, picture in zip(images, pictures, strict=True):
            try:
                image = read_for_detector(path, upright=True)
            except UnreadableImageError as error:
                _print(console, f"skipped: {error}")
                unreadable += 1
                continue
            with torch.no_grad(), autocast(settings, processes.device):
                (found,) = task.detect(model, [image.to(processes.device)])
            kept = found.above(threshold).cpu()
            _add_to(content, path, image, kept, names)
            _write_picture(picture, image, kept, names)
            _print(console, f"{path}: {_summary(kept, names)}")
    write_atomically(out / DETECTIONS, json.dumps(content) + "\n")
    _print(console, f"Pictures and {DETECTIONS} are in {out}.")
    if unreadable:
        raise RunStoppedError(f"{unreadable} of {len(images)} images could not be read, see above.")
    return content


def _add_to(
    content: dict[str, Any], path: Path, image: Tensor, found: Detections, names: Mapping[int, str]
) -> None:
    """Add an image and its detections to the content of detections.json."""
    height, width = image.shape[-2:]
    number = len(content["images"]) + 1
    content["images"].append({"id": number, "file_name": str(path), "width": width, "height": height})
    for detection in found.coco_results(number, {label: label for label in names}):
        _, _, across, down = detection["bbox"]
        content["annotations"].append(
            {
                "id": len(content["annotations"]) + 1,
                **detection,
                "category": names[detection["category_id"]],
                "area": across * down,
                "iscrowd": 0,
            }
        )


def _write_picture(path: Path, image: Tensor, found: Detections, names: Mapping[int, str]) -> None:
    texts = [
        f"{names.get(label, label)} {score:.2f}"
        for label, score in zip(found.labels.tolist(), found.scores.tolist(), strict=True)
    ]
    png = io.BytesIO()
    to_pil_image(draw_detections(image, found.boxes, texts, found.masks)).save(png, "png")
    write_atomically(path, png.getbuffer())


def _summary(found: Detections, names: Mapping[int, str]) -> str:
    counts = Counter(names.get(label, str(label)) for label in found.labels.tolist())
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "nothing found"


def _print(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
