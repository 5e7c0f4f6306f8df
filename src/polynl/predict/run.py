"""`polynl predict`: what a trained detector finds in images."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights
from torchvision.transforms.v2.functional import to_pil_image

from polynl.data.classification import UnreadableImageError, read_for_detector
from polynl.errors import RunStoppedError, SettingsError, near_matches
from polynl.files import write_atomically
from polynl.metrics.coco import detections_of
from polynl.models.weights import load_weights
from polynl.predict.drawing import drawn
from polynl.tasks.base import DetectionTask
from polynl.train.evaluation import autocast, placed, set_up_torch
from polynl.train.processes import joined
from polynl.train.recipe import Recipe
from polynl.train.recipe_file import load_recipe
from polynl.train.run_folder import LABELS, RECIPE

DETECTIONS = "detections.json"
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"}


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
    """Draw what is found in images, and write it down; gives what is written, in COCO's format."""
    if not 0 <= threshold <= 1:
        raise SettingsError(f"--threshold {threshold:g}: expected a number from 0 to 1.")
    if not checkpoint.is_file():
        raise SettingsError(f"--checkpoint: there is no file {checkpoint}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError("predict needs one process: start it without torchrun.")
    images = _images(paths)
    pictures = list(_pictures(images, out))
    settings = _recipe(checkpoint, recipe, keys)
    set_up_torch(settings)
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    unreadable = 0
    with joined(settings.device) as processes:
        task, model = trained(settings, checkpoint, processes.device)
        _make_folder(out)
        names = task.labels()
        content["categories"] = [{"id": label, "name": name} for label, name in names.items()]
        for path, picture in zip(images, pictures, strict=True):
            try:
                image = read_for_detector(path, upright=True)
            except UnreadableImageError as error:
                console.print(escape(f"skipped: {error}"), highlight=False, soft_wrap=True)
                unreadable += 1
                continue
            with torch.no_grad(), autocast(settings, processes.device):
                (found,) = task.detect(model, [image.to(processes.device)])
            sure = {name: value[found["scores"] >= threshold].cpu() for name, value in found.items()}
            _note(content, path, image, sure, names)
            _write_picture(picture, image, sure, names)
            console.print(escape(f"{path}: {_told(sure, names)}"), highlight=False, soft_wrap=True)
    write_atomically(out / DETECTIONS, json.dumps(content) + "\n")
    console.print(escape(f"Pictures and {DETECTIONS} are in {out}."), highlight=False, soft_wrap=True)
    if unreadable:
        raise RunStoppedError(f"{unreadable} of {len(images)} images could not be read, see above.")
    return content


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise SettingsError(f"--out: {out} is a file; the pictures need a folder.") from None
    except OSError as error:
        raise SettingsError(f"--out: {out} cannot be written to: {error.strerror}.") from None


def trained(recipe: Recipe, checkpoint: Path, device: torch.device) -> tuple[DetectionTask, nn.Module]:
    """The task and its model with the weights of a file, ready to detect."""
    task = recipe.untrained().build_task(_labels(checkpoint, recipe.task))
    if not isinstance(task, DetectionTask):
        raise SettingsError(f"predict draws what detectors find, and {recipe.task} finds no boxes.")
    model = task.model()
    try:
        load_weights(model, checkpoint, trained=True)
    except ValueError as error:
        raise SettingsError(
            f"--checkpoint: {error}\nA run keeps {RECIPE} and {LABELS} beside its checkpoints; keep them so."
        ) from error
    return task, placed(model, recipe, device).eval()


def _labels(checkpoint: Path, task: str) -> dict[int, str] | None:
    """The names that the run has kept, or those of torchvision's COCO weights, or None for the task's own."""
    file = checkpoint.parent / LABELS
    if not file.is_file() and task != "instance_segmentation":
        return None
    if not file.is_file():
        names = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
        return {number: name for number, name in enumerate(names) if number > 0}
    try:
        return {int(number): str(name) for number, name in json.loads(file.read_text("utf-8")).items()}
    except (ValueError, AttributeError) as error:
        raise SettingsError(f"{file} is no file of names by number: {error}.") from None


def _recipe(checkpoint: Path, recipe: str | None, keys: Sequence[str]) -> Recipe:
    beside = checkpoint.parent / RECIPE
    if recipe is None and not beside.is_file():
        raise SettingsError(
            f"there is no {RECIPE} beside {checkpoint}: say with --recipe what it was trained by, "
            "coco/resnet50_none for torchvision's Mask R-CNN."
        )
    return load_recipe(beside if recipe is None else recipe, keys, ("checkpoint", "out", "threshold"))


def _images(paths: Sequence[Path]) -> list[Path]:
    """The files, and those in the folders."""
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()
            )
            if not inside:
                raise SettingsError(f"there is no image in the folder {path}.")
            images += inside
        elif path.is_file():
            images.append(path)
        else:
            there = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            raise SettingsError(f"there is no image {path}.{near_matches(path.name, there)}")
    return images


def _pictures(images: Sequence[Path], out: Path) -> Iterator[Path]:
    """A file for each image, named like it; images of one name in several folders get numbers."""
    taken: set[str] = set()
    originals = {image.resolve() for image in images}
    for image in images:
        name, number = image.stem, 1
        while name in taken:
            number += 1
            name = f"{image.stem}_{number}"
        taken.add(name)
        picture = out / f"{name}.png"
        if picture.resolve() in originals:
            raise SettingsError(f"--out: {picture} is one of the images; choose a folder for the pictures.")
        yield picture


def _note(
    content: dict[str, Any], path: Path, image: Tensor, found: Mapping[str, Tensor], names: Mapping[int, str]
) -> None:
    height, width = image.shape[-2:]
    number = len(content["images"]) + 1
    content["images"].append({"id": number, "file_name": str(path), "width": width, "height": height})
    same = {label: label for label in names}
    parts = found["boxes"], found["labels"], found["scores"], found.get("masks")
    for detection in detections_of(number, *parts, same):
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


def _write_picture(path: Path, image: Tensor, found: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
    texts = [
        f"{names.get(label, label)} {score:.2f}"
        for label, score in zip(found["labels"].tolist(), found["scores"].tolist(), strict=True)
    ]
    png = io.BytesIO()
    to_pil_image(drawn(image, found, texts)).save(png, "png")
    write_atomically(path, png.getbuffer())


def _told(found: Mapping[str, Tensor], names: Mapping[int, str]) -> str:
    labels = found["labels"].tolist()
    counts = {names.get(label, str(label)): labels.count(label) for label in dict.fromkeys(labels)}
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "nothing found"
