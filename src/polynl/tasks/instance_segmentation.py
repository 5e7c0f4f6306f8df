"""Instance segmentation: Mask R-CNN's losses, and COCO's AP of boxes and of masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import torch.distributed as dist
from pydantic import Field, field_validator
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN

from polynl.data.coco import CocoImages, aspect_groups, contiguous_labels, labels_by_id
from polynl.data.coco_annotations import Annotations, only, read_annotations
from polynl.data.scene_instances import SceneInstances
from polynl.errors import SettingsError
from polynl.metrics.coco import Detection, coco_scores, detections_of, read_detections, write_detections
from polynl.models.detectors import OWN_ARGUMENTS, mask_rcnn
from polynl.tasks.annotated import AnnotatedPart
from polynl.tasks.base import Batch, DetectionScorer, DetectionTask, Images, readable
from polynl.tasks.drawn import DrawnPart
from polynl.tasks.network import DetectorPart, built, check_known

Side = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class Sets:
    """Images to train and to score on, and what a label of the model means."""

    train: CocoImages | SceneInstances
    val: CocoImages | SceneInstances
    names: dict[int, str]
    category_ids: dict[int, int]


class MaskRCNNPart(DetectorPart):
    """The detector."""

    box_width: int = Field(1024, gt=0)
    """Channels of the box head's two layers."""
    mask_widths: Annotated[tuple[Side, ...], Field(min_length=1)] = (256, 256, 256, 256)
    """Channels of the mask head's convolutions."""
    anchor_sizes: tuple[Annotated[float, Field(gt=0)], ...] = (32, 64, 128, 256, 512)
    """Sides of anchors in pixels of the resized image, one for each level of the pyramid."""
    roi_scale: int = Field(224, gt=0)
    """The side of a box that is looked at on the map of stride 16."""

    @field_validator("detector_options")
    @classmethod
    def _known_detector_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        check_known(options, MaskRCNN.__init__, {*OWN_ARGUMENTS, "self", "min_size", "max_size"}, "MaskRCNN")
        return options


class CocoPart(AnnotatedPart):
    """Images on disk with annotations in COCO's format."""

    source: Literal["coco"]
    """Files as COCO has them."""
    train: str = "train2017"
    """Its folder of training images."""
    val: str = "val2017"
    """Its folder of images to score on."""
    train_annotations: str = "annotations/instances_train2017.json"
    """What is on the training images."""
    val_annotations: str = "annotations/instances_val2017.json"
    """What is on the images to score on."""
    categories: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of those to learn and to score; all unless given."""
    category_ids: Literal["keep", "renumber"] = "keep"
    """keep: the model knows categories by their ids, as torchvision's COCO weights do; or from 1 on."""
    group_by_aspect: bool = True
    """In training, make batches of images of like shapes, so that little is padded."""

    def sets(self) -> Sets:
        """All that the annotations say, checked."""
        train, val = self._annotations("train"), self._annotations("val")
        if odd := sorted(train.categories.items() ^ val.categories.items()):
            category, name = odd[0]
            raise SettingsError(
                f"{train.path} and {val.path} have different categories: {category} ({name}) only in one."
            )
        if all(entry["iscrowd"] for entry in val.content["annotations"]):
            raise SettingsError(f"{val.path} has no object to find, so nothing can be scored.")
        labels = (labels_by_id if self.category_ids == "keep" else contiguous_labels)(train.categories)

        def images(annotations: Annotations, split: str) -> CocoImages:
            return CocoImages(
                annotations,
                self.root / split,
                labels=labels,
                training=annotations is train,
                flip=self.flip,
                on_bad_image=self.on_bad_image,
            )

        return Sets(
            images(train, self.train),
            images(val, self.val),
            names={label: train.categories[category] for category, label in labels.items()},
            category_ids={label: category for category, label in labels.items()},
        )

    def _annotations(self, split: Literal["train", "val"]) -> Annotations:
        annotations = read_annotations(*self.places(split))
        return annotations if self.categories is None else only(annotations, self.categories)


class SceneInstancesPart(DrawnPart):
    """Scenes drawn from a seed: nothing to download."""

    flip: float = Field(0.5, ge=0, le=1)
    """In training, the probability that an image is mirrored."""
    group_by_aspect: bool = False
    """All scenes are square."""

    def sets(self) -> Sets:
        """The scenes, drawn."""
        drawn_from, scored_on = self.splits()
        train = SceneInstances(**drawn_from, training=True, flip=self.flip)
        val = SceneInstances(**scored_on, training=False)
        return Sets(train, val, train.categories, {label: label for label in train.categories})


class InstanceSegmentation(DetectionTask):
    """Scored by COCO's AP of boxes and of masks, in percent."""

    best_by = "mask_ap"
    headline = ("box_ap", "mask_ap")

    def __init__(
        self,
        model: MaskRCNNPart,
        data: CocoPart | SceneInstancesPart,
        labels: Mapping[int, str] | None = None,
    ) -> None:
        self._model, self._data = model, data
        self._names = None if labels is None else dict(labels)
        self._loaded: Sets | None = None

    @property
    def _sets(self) -> Sets:
        if self._loaded is None:
            self._loaded = self._data.sets()
        return self._loaded

    def labels(self) -> dict[int, str]:
        """The names of the categories."""
        return self._sets.names if self._names is None else self._names

    def check(self) -> None:
        """The data and the weights are there, and the detector can be built."""
        self._data.check()
        self._model.check_files()
        self.model()

    def train_set(self) -> Images:
        """(image as uint8, boxes, labels and masks)."""
        return self._sets.train

    def val_set(self) -> Images:
        """(image as uint8, its number)."""
        return self._sets.val

    def groups(self) -> Sequence[int] | None:
        """Images of like shapes, as torchvision's reference groups them."""
        return aspect_groups(self._sets.train.aspect_ratios) if self._data.group_by_aspect else None

    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """Images of any sizes, side by side."""
        good, bad = readable(samples, training=training)
        return Batch([image for image, _ in good], [target for _, target in good], bad)

    def model(self) -> nn.Module:
        """The detector, with an output for every label and for the background."""
        return built(mask_rcnn, num_classes=max(self.labels()) + 1, **self._model.arguments())

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Of the proposals and of the two heads."""
        images = [image.float() / 255 for image in batch.images]
        return model(images, batch.targets)

    def detect(self, model: nn.Module, images: Sequence[Tensor]) -> list[Mapping[str, Tensor]]:
        """What the model, in eval mode, finds; masks are boolean."""
        found = model([image.float() / 255 for image in images])
        return [{**one, "masks": one["masks"][:, 0] > 0.5} for one in found]

    def scorer(self, device: torch.device) -> DetectionScorer:
        """COCO's AP."""
        return CocoScorer(self)

    def detections(self, model: nn.Module, batch: Batch) -> list[Detection]:
        """What the model finds in a batch of the images to score on, as COCO's results files say it."""
        found = self.detect(model, batch.images)
        return [
            detection
            for target, one in zip(batch.targets, found, strict=True)
            for detection in detections_of(
                target["image_id"],
                one["boxes"],
                one["labels"],
                one["scores"],
                one["masks"],
                self._sets.category_ids,
            )
        ]

    def read_detections(self, path: Path) -> list[Detection]:
        """A results file of COCO's format, of any program."""
        return read_detections(path, self._sets.val.ground_truth)

    def score_detections(
        self, detections: Sequence[Detection], images: Sequence[int] | None = None
    ) -> dict[str, float]:
        """The AP on all images, or on those that are named."""
        return coco_scores(self._sets.val.ground_truth, detections, images)


class CocoScorer:
    """Collects detections; the first process puts them together and scores them."""

    def __init__(self, task: InstanceSegmentation) -> None:
        self._task = task
        self._images: list[int] = []
        self._found: list[Detection] = []

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Take in what is found in a batch."""
        self._images += [target["image_id"] for target in batch.targets]
        self._found += self._task.detections(model, batch)

    def compute(self) -> dict[str, float]:
        """The AP on the images of all processes."""
        if not dist.is_initialized():
            return self._task.score_detections(self._found, self._images)
        first = dist.get_rank() == 0
        shares: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object((self._images, self._found), shares)
        scores: list[Any] = [None]
        if shares is not None:
            self._images = [image for images, _ in shares for image in images]
            self._found = [detection for _, found in shares for detection in found]
            scores = [self._task.score_detections(self._found, self._images)]
        dist.broadcast_object_list(scores, src=0)
        return cast(dict[str, float], scores[0])

    def save(self, path: Path) -> None:
        """Write the detections as a results file of COCO's format; the first process has all of them."""
        write_detections(path, self._found)


InstanceData = Annotated[CocoPart | SceneInstancesPart, Field(discriminator="source")]
