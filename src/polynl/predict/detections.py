"""Detections in images: a picture of each image, and a file in COCO's format."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

from polynl.data.images import read_for_detector
from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.predict.drawing import draw_detections
from polynl.tasks.base import DetectionTask
from polynl.tasks.detections import Detections

DETECTIONS = "detections.json"


class DetectionPredictor:
    """Draws and collects detections whose score is at least `threshold`."""

    def __init__(self, task: DetectionTask, out: Path, *, threshold: float) -> None:
        if not 0 <= threshold <= 1:
            raise SettingsError(f"--threshold {threshold:g}: expected a number from 0 to 1.")
        self._task, self._out, self._threshold = task, out, threshold
        self._names = task.labels()
        categories = [{"id": label, "name": name} for label, name in self._names.items()]
        self.content: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}

    def pictures(self, names: Sequence[str]) -> list[Path]:
        """One for each image."""
        return [self._out / f"{name}.png" for name in names]

    def read(self, path: Path) -> Tensor:
        """An image that is not too thin for a detector."""
        return read_for_detector(path, upright=True)

    def add(self, model: nn.Module, path: Path, name: str, image: Tensor) -> str:
        """Detect, draw the picture, and count what was found."""
        (found,) = self._task.detect(model, [image])
        kept = found.above(self._threshold).cpu()
        self._collect(path, image, kept)
        (picture,) = self.pictures([name])
        self._draw(picture, image.cpu(), kept)
        counts = Counter(self._names.get(label, str(label)) for label in kept.labels.tolist())
        return ", ".join(f"{count} × {name}" for name, count in counts.items()) or self._nothing(found)

    def _nothing(self, found: Detections) -> str:
        """That nothing was found, or that everything is below the threshold."""
        if not len(found.scores):
            return "nothing found"
        return f"nothing above {self._threshold:g}; the highest score is {found.scores.max():.2f}"

    def save(self) -> str:
        """Write detections.json."""
        write_atomically(self._out / DETECTIONS, json.dumps(self.content) + "\n")
        return f"Pictures and {DETECTIONS} are"

    def _collect(self, path: Path, image: Tensor, found: Detections) -> None:
        """Add an image and its detections to the content of detections.json."""
        height, width = image.shape[-2:]
        images, annotations = self.content["images"], self.content["annotations"]
        images.append({"id": len(images) + 1, "file_name": str(path), "width": width, "height": height})
        for detection in found.coco_results(len(images), {label: label for label in self._names}):
            _, _, across, down = detection["bbox"]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    **detection,
                    "category": self._names[detection["category_id"]],
                    "area": across * down,
                    "iscrowd": 0,
                }
            )

    def _draw(self, path: Path, image: Tensor, found: Detections) -> None:
        texts = [
            f"{self._names.get(label, label)} {score:.2f}"
            for label, score in zip(found.labels.tolist(), found.scores.tolist(), strict=True)
        ]
        png = io.BytesIO()
        to_pil_image(draw_detections(image, found.boxes, texts, found.masks)).save(png, "png")
        write_atomically(path, png.getbuffer())
