"""Instance segmentation: Mask R-CNN's losses, and COCO's AP of boxes and of masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, MaskRCNN_ResNet50_FPN_Weights

from polynl.errors import SettingsError
from polynl.tasks.base import Batch, DetectionScorer, DetectionTask, Images, PaperTable, readable
from polynl.tasks.config import (
    AnnotatedConfig,
    DetectorConfig,
    DrawnConfig,
    Side,
    Split,
    TaskConfig,
    built,
    check_known,
)
from polynl.tasks.instance_segmentation.annotations import only, read_annotations
from polynl.tasks.instance_segmentation.data import CocoImages, aspect_groups, contiguous_labels, labels_by_id
from polynl.tasks.instance_segmentation.metric import (
    Detection,
    coco_scores,
    detections_of,
    read_detections,
    write_detections,
)
from polynl.tasks.instance_segmentation.model import OWN_ARGUMENTS, mask_rcnn
from polynl.tasks.instance_segmentation.scenes import SceneInstances


@dataclass(frozen=True)
class Loaded:
    """The images of a split, and what a label of the model means."""

    images: CocoImages | SceneInstances
    names: dict[int, str]
    category_ids: dict[int, int]
    left_out: frozenset[int] = frozenset()
    """Categories of the file that are neither learned nor scored."""


class MaskRCNNConfig(DetectorConfig):
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
        # A head is a module, which no file can say.
        without = {*OWN_ARGUMENTS, "rpn_head", "self", "min_size", "max_size", "kwargs"}
        check_known(options, MaskRCNN.__init__, without, "MaskRCNN")
        return options


class CocoConfig(AnnotatedConfig):
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

    def load(self, split: Split) -> Loaded:
        """All that the annotations of a split say, checked."""
        file, folder = self.places(split)
        everything = read_annotations(file, folder)
        chosen = everything if self.categories is None else only(everything, self.categories)
        if split == "val" and all(entry["iscrowd"] for entry in chosen.content["annotations"]):
            raise SettingsError(f"{file} has no object to find, so nothing can be scored.")
        labels = (labels_by_id if self.category_ids == "keep" else contiguous_labels)(chosen.categories)
        images = CocoImages(
            chosen,
            folder,
            labels=labels,
            training=split == "train",
            flip=self.flip,
            on_bad_image=self.on_bad_image,
        )
        return Loaded(
            images,
            names={label: chosen.categories[category] for category, label in labels.items()},
            category_ids={label: category for category, label in labels.items()},
            left_out=frozenset(everything.categories.keys() - chosen.categories.keys()),
        )


class SceneInstancesConfig(DrawnConfig):
    """Scenes drawn from a seed: nothing to download."""

    flip: float = Field(0.5, ge=0, le=1)
    """In training, the probability that an image is mirrored."""
    group_by_aspect: bool = False
    """All scenes are square."""

    def load(self, split: Split) -> Loaded:
        """The scenes of a split, drawn."""
        images = SceneInstances(**self.drawn_from(split), training=split == "train", flip=self.flip)
        return Loaded(images, images.categories, {label: label for label in images.categories})


InstanceData = Annotated[CocoConfig | SceneInstancesConfig, Field(discriminator="source")]


class InstanceSegmentationConfig(TaskConfig):
    """Images with things in them, each with a box and a mask."""

    model: MaskRCNNConfig = MaskRCNNConfig()
    data: InstanceData


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

    def __init__(self, config: InstanceSegmentationConfig, labels: Mapping[int, str] | None = None) -> None:
        self._model, self._data = config.model, config.data
        self._names = None if labels is None else dict(labels)
        self._loaded: dict[Split, Loaded] = {}

    @classmethod
    def pretrained_labels(cls) -> dict[int, str]:
        """Those of torchvision's COCO weights."""
        names = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
        return {number: name for number, name in enumerate(names) if number > 0}

    def _load(self, split: Split) -> Loaded:
        if split not in self._loaded:
            self._loaded[split] = self._data.load(split)
        return self._loaded[split]

    def labels(self) -> dict[int, str]:
        """The names of the categories."""
        return self._load("val").names if self._names is None else self._names

    def check(self, *, training: bool = True) -> None:
        """The data and the weights are there, and the detector can be built."""
        self._data.check(training=training)
        if training:
            self._model.check_files()
            self._check_categories()
            self.model()

    def _check_categories(self) -> None:
        train, val = (self._load(split).names.items() for split in get_args(Split))
        for label, name in sorted(train ^ val):
            where = "to train on" if (label, name) in train else "to score on"
            raise SettingsError(f"category {label} ({name}) is only in the annotations of images {where}.")

    def train_set(self) -> Images:
        """(image as uint8, boxes, labels and masks)."""
        return self._load("train").images

    def val_set(self) -> Images:
        """(image as uint8, its number)."""
        return self._load("val").images

    def groups(self) -> Sequence[int] | None:
        """Images of like shapes, as torchvision's reference groups them."""
        if not self._data.group_by_aspect:
            return None
        return aspect_groups(self._load("train").images.aspect_ratios)

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

    def scorer(self) -> DetectionScorer:
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
                self._load("val").category_ids,
            )
        ]

    def read_detections(self, path: Path) -> list[Detection]:
        """A results file of COCO's format, of any program."""
        val = self._load("val")
        return read_detections(path, val.images.ground_truth, left_out=val.left_out)

    def score_detections(
        self, detections: Sequence[Detection], images: Sequence[int] | None = None
    ) -> dict[str, float]:
        """The AP on all images, or on those that are named."""
        return coco_scores(self._load("val").images.ground_truth, detections, images)


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

    def share(self) -> tuple[list[int], list[Detection]]:
        """The images, and what was found in them."""
        return self._images, self._found

    def compute(self, shares: Sequence[tuple[list[int], list[Detection]]]) -> dict[str, float]:
        """The AP on the images of all processes."""
        images = [image for images, _ in shares for image in images]
        self._found = [detection for _, found in shares for detection in found]
        return self._task.score_detections(self._found, images)

    def save(self, path: Path) -> None:
        """Write the detections as a results file of COCO's format; the first process has all of them."""
        write_detections(path, self._found)
