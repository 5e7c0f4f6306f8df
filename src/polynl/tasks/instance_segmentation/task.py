"""Instance segmentation: Mask R-CNN's losses, COCO's AP of boxes and masks."""

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
from polynl.tasks.base import Batch, DetectionTask, PaperTable
from polynl.tasks.detections import Detections
from polynl.tasks.instance_segmentation.config import InstanceSegmentationConfig
from polynl.tasks.instance_segmentation.data import aspect_groups
from polynl.tasks.instance_segmentation.metric import (
    Detection,
    coco_scores,
    read_detections,
    write_detections,
)
from polynl.tasks.instance_segmentation.outcomes import coco_outcomes, score_coco
from polynl.tasks.outcomes import Array, Outcomes


class InstanceSegmentation(DetectionTask):
    """Scored by COCO's AP of boxes and of masks, in percent."""

    name = "instance_segmentation"
    config = InstanceSegmentationConfig
    scores = {  # noqa: RUF012
        "box_ap": "box AP",
        "box_ap50": "AP50",
        "box_ap75": "AP75",
        "mask_ap": "mask AP",
        "mask_ap50": "AP50",
        "mask_ap75": "AP75",
    }
    best_by = "mask_ap"
    extra = "detect"
    headline = ("box_ap", "mask_ap")
    network = "Mask R-CNN, {arch},"
    paper = PaperTable(
        "Mask R-CNN, ResNet-50, on COCO",
        tuple(scores),
        {
            "none": (37.9, 59.2, 41.0, 34.6, 56.0, 36.9),
            "non_local": (38.8, 60.6, 42.0, 35.4, 57.3, 37.7),
            "tesa": (39.5, 60.9, 43.1, 35.4, 57.2, 37.5),
            "latent_gnn": (38.9, 60.4, 42.4, 35.3, 57.3, 37.4),
            "efficient_nl": (38.9, 60.3, 42.2, 35.4, 57.2, 37.7),
            "poly_nl": (39.2, 60.8, 42.2, 35.4, 57.4, 37.6),
            "poly_nl@res3": (38.6, 60.1, 41.5, 35.2, 56.9, 37.4),
            "poly_nl@res5": (38.7, 60.6, 41.9, 35.2, 57.2, 37.3),
            "poly_nl@res345": (39.8, 61.7, 43.2, 36.0, 58.4, 38.3),
        },
        digits=1,
    )

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
        """The losses of the proposals and of the two heads."""
        images = [image.float() / 255 for image in batch.images]
        return model(images, batch.targets)

    def detect(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detections]:
        """Boxes and masks."""
        found = model([image.float() / 255 for image in images])
        return [
            Detections(one["boxes"], one["scores"], one["labels"], one["masks"][:, 0] > 0.5) for one in found
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
