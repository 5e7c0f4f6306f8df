"""What tasks with COCO's categories and scores share, with masks or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from polynl.config import errors_at
from polynl.data.config import Split
from polynl.errors import SettingsError
from polynl.tasks.base import Batch, DetectionTask
from polynl.tasks.coco.data import aspect_groups
from polynl.tasks.coco.metric import (
    Detection,
    coco_scores,
    read_detections,
    write_detections,
)
from polynl.tasks.coco.outcomes import coco_outcomes, score_coco
from polynl.tasks.detections import Detections
from polynl.tasks.outcomes import Array, Outcomes


class CocoDetection(DetectionTask):
    """Torchvision's R-CNNs, scored by COCO's AP; a task adds its config, its scores and its names."""

    extra = "detect"

    @classmethod
    def pretrained_labels(cls) -> dict[int, str]:
        """The categories of torchvision's COCO weights."""
        names = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
        return {number: name for number, name in enumerate(names) if number > 0}

    def labels(self) -> dict[int, str]:
        """The names of the categories."""
        return self._load("val").categories if self._labels is None else self._labels

    def check(self, *, training: bool = True) -> None:
        """Raise a SettingsError if data or weights are missing, or if the detector cannot be built."""
        super().check(training=training)
        if training:
            train, val = (self._load(split).categories.items() for split in get_args(Split))
            for label, name in sorted(train ^ val):
                where = "training" if (label, name) in train else "validation"
                raise SettingsError(f"category {label} ({name}) is only in the {where} annotations.")
            self.model()

    def groups(self) -> Sequence[int] | None:
        """Images of similar aspect ratio, grouped as in torchvision's reference."""
        if not self._data.group_by_aspect:
            return None
        return aspect_groups(self._load("train").aspect_ratios)

    def model(self) -> nn.Module:
        """The detector, with an output for every label and for the background."""
        with errors_at("model"):
            return self._model.build(num_classes=max(self.labels()) + 1)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The losses of the proposals and of the heads."""
        images = [image.float() / 255 for image in batch.images]
        return model(images, batch.targets)

    def detect(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detections]:
        """Boxes and, if the detector has a head for them, masks."""
        found = model([image.float() / 255 for image in images])
        return [
            Detections(
                one["boxes"],
                one["scores"],
                one["labels"],
                one["masks"][:, 0] > 0.5 if "masks" in one else None,
            )
            for one in found
        ]

    def by_image(self, targets: Sequence[Any], found: Sequence[Detections]) -> dict[int, list[Detection]]:
        """Entries of a COCO results file by image id."""
        category_ids = self._load("val").category_ids
        return {
            target["image_id"]: one.coco_results(target["image_id"], category_ids)
            for target, one in zip(targets, found, strict=True)
        }

    def read_detections(self, path: Path) -> dict[int, list[Detection]]:
        """A COCO results file of any program."""
        val = self._load("val")
        found = {image["id"]: list[Detection]() for image in val.ground_truth["images"]}
        for detection in read_detections(path, val.ground_truth, left_out=val.left_out):
            found[detection["image_id"]].append(detection)
        return found

    def write_detections(self, path: Path, detections: Mapping[int, Sequence[Detection]]) -> None:
        """A COCO results file."""
        write_detections(path, list(chain.from_iterable(detections.values())))

    def score_detections(self, detections: Mapping[int, Sequence[Detection]]) -> dict[str, float]:
        """COCO's AP."""
        truth = self._load("val").ground_truth
        return coco_scores(truth, list(chain.from_iterable(detections.values())), detections)

    def outcomes(self, detections: Mapping[int, Sequence[Detection]]) -> Outcomes:
        """COCOeval's matches."""
        truth = self._load("val").ground_truth
        return coco_outcomes(truth, list(chain.from_iterable(detections.values())), detections)

    @classmethod
    def score_outcomes(cls, outcomes: Outcomes, weights: Array) -> dict[str, Array]:
        """COCO's AP."""
        return score_coco(outcomes, weights)
