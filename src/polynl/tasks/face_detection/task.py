"""Face detection: RetinaNet's losses, and WIDER FACE's AP of Easy, Medium and Hard faces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet

from polynl.errors import SettingsError
from polynl.tasks.base import Batch, DetectionScorer, DetectionTask, Images, PaperTable, readable
from polynl.tasks.config import (
    NEUTRAL,
    AnnotatedConfig,
    Config,
    DetectorConfig,
    Side,
    Split,
    TaskConfig,
    built,
    check_known,
)
from polynl.tasks.face_detection.data import FaceImage, FaceImages, count_faces, event_and_name, read_faces
from polynl.tasks.face_detection.files import read_ground_truth, read_predictions, write_predictions
from polynl.tasks.face_detection.metric import (
    SUBSETS,
    Faces,
    GroundTruth,
    Image,
    Predictions,
    wider_face_scores,
)
from polynl.tasks.face_detection.scenes import FaceScenes
from polynl.tasks.face_detection.transforms import FacePatch
from polynl.tasks.instance_segmentation.model import FACE_ARGUMENTS, face_detector

FACE = 1


class FaceDetectorConfig(DetectorConfig):
    """The detector."""

    norm: Literal["frozen", "batch", "sync"] = "batch"
    """Of the ResNet: batch statistics of a process, or of all (GPU only), or values stay as they are."""
    levels: tuple[int, ...] = (2, 3, 4, 5, 6)
    """Of the pyramid: level n has a map of stride 2^n; tiny faces need level 2."""
    anchor_scale: float = Field(4.0, gt=0)
    """Side of the smallest of a level's three anchors, in strides."""
    positive_iou: float = Field(0.35, ge=0, le=1)
    """An anchor that overlaps a face by so much is to find it."""
    negative_iou: float = Field(0.35, ge=0, le=1)
    """An anchor that overlaps every face by less is to find nothing."""
    min_size: Side | Annotated[list[Side], Field(min_length=1)] = 1100
    """Images to score on are resized to this shorter side; training takes its patches as they are."""
    max_size: Side = 1650
    """The longer side is no longer than this."""

    @field_validator("detector_options")
    @classmethod
    def _known_detector_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        without = {*FACE_ARGUMENTS, "self", "min_size", "max_size", "kwargs"}
        check_known(options, RetinaNet.__init__, without, "RetinaNet")
        return options


class PatchConfig(Config):
    """The square patches that are trained on."""

    size: int = Field(640, gt=0)
    """Side in pixels, once resized."""
    scale: tuple[float, float] = (0.3, 1.0)
    """Side before that, as a part of the image's shorter one, from and to."""
    distort: float = Field(0.5, ge=0, le=1)
    """Probability of each distortion of colours."""
    min_face: float = Field(0.0, ge=0)
    """Faces whose shorter side is below so many pixels are left out."""

    @field_validator("scale")
    @classmethod
    def _part_of_a_side(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"expected [from, to] with 0 < from <= to <= 1; got {list(scale)}")
        return scale

    def patches(self, flip: float) -> FacePatch:
        """What makes them."""
        return FacePatch(self.size, scale=self.scale, distort=self.distort, min_face=self.min_face, flip=flip)


class WiderFaceConfig(AnnotatedConfig):
    """WIDER FACE in its official layout."""

    source: Literal["wider_face"]
    """Files as WIDER FACE has them."""
    train: str = "WIDER_train/images"
    """Its folder of training images."""
    val: str = "WIDER_val/images"
    """Its folder of images to score on."""
    train_annotations: str = "wider_face_split/wider_face_train_bbx_gt.txt"
    """What is on the training images."""
    val_annotations: str = "wider_face_split/wider_face_val_bbx_gt.txt"
    """What is on the images to score on."""
    ground_truth: Path | None = Field(None, json_schema_extra=NEUTRAL)
    """The folder of the official .mat files, which say which faces are Easy, Medium and Hard.

    Without it all valid faces count as Hard, and there are no others.
    """
    truth_scale: float = Field(1.0, gt=0)
    """What boxes are multiplied by to be those of `ground_truth`: 2 for images at half size."""
    patch: PatchConfig = PatchConfig()

    def check(self, *, training: bool) -> None:
        """Folders and files are there."""
        super().check(training=training)
        if self.ground_truth is not None and not self.ground_truth.is_dir():
            raise SettingsError(f"data.ground_truth: there is no folder {self.ground_truth}.")
        if self.ground_truth is None and self.truth_scale != 1:
            raise SettingsError(
                f"data.truth_scale: {self.truth_scale:g} is for data.ground_truth, and there is none of that."
            )

    def load(self, split: Split) -> FaceImages:
        """All that the annotations of a split say, checked."""
        file, folder = self.places(split)
        train, faces = split == "train", read_faces(file, folder)
        if train and not (counts := count_faces(faces)).usable:
            raise SettingsError(f"{file} has no face to train on: {counts}.")
        return FaceImages(
            faces,
            folder,
            training=train,
            transform=self.patch.patches(self.flip) if train else None,
            on_bad_image=self.on_bad_image,
        )

    def truth(self, images: FaceImages) -> GroundTruth:
        """The faces on images to score on."""
        if self.ground_truth is not None:
            return read_ground_truth(self.ground_truth).only(map(event_and_name, images.names))
        faces = read_faces(*self.places("val"))
        return GroundTruth({event_and_name(image.name): _all_count(image) for image in faces})


class FaceScenesConfig(Config):
    """Faces drawn from a seed: nothing to download."""

    source: Literal["scenes"]
    """Drawn when the run begins."""
    images: int = Field(1_000, gt=0)
    """Scenes to train on."""
    val_images: int = Field(100, gt=0)
    """Scenes to score on."""
    size: int = Field(256, ge=32)
    """Side in pixels."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of the scenes."""
    flip: float = Field(0.5, ge=0, le=1)
    """In training, the probability that an image is mirrored."""
    patch: PatchConfig = PatchConfig(size=128, scale=(0.4, 1.0))

    @property
    def truth_scale(self) -> float:
        """The scenes are as large as their ground truth."""
        return 1.0

    def check(self, *, training: bool) -> None:
        """Nothing can be missing."""

    def load(self, split: Split) -> FaceScenes:
        """The scenes of a split, drawn."""
        train = split == "train"
        return FaceScenes(
            self.images if train else self.val_images,
            size=self.size,
            split=split,
            seed=self.seed,
            training=train,
            transform=self.patch.patches(self.flip) if train else None,
        )

    def truth(self, images: FaceScenes) -> GroundTruth:
        """The faces on scenes to score on."""
        drawn = images.ground_truth()
        return GroundTruth(
            {
                image: Faces(boxes, {subset: drawn.subsets[subset][image] for subset in SUBSETS})
                for image, boxes in drawn.boxes.items()
            }
        )


def _all_count(image: FaceImage) -> Faces:
    nothing = np.zeros(0, dtype=np.int64)
    (rows,) = np.nonzero(image.usable.numpy())
    return Faces(image.boxes.numpy(), {"easy": nothing, "medium": nothing, "hard": rows})


FaceData = Annotated[WiderFaceConfig | FaceScenesConfig, Field(discriminator="source")]


class FaceDetectionConfig(TaskConfig):
    """Images with faces in them."""

    model: FaceDetectorConfig = FaceDetectorConfig()
    data: FaceData


class FaceDetection(DetectionTask):
    """Scored by WIDER FACE's AP of Easy, Medium and Hard faces, in percent."""

    name = "face_detection"
    config = FaceDetectionConfig
    scores = {"easy_ap": "Easy AP", "medium_ap": "Medium AP", "hard_ap": "Hard AP"}  # noqa: RUF012
    best_by = "hard_ap"
    headline = ("easy_ap", "medium_ap", "hard_ap")
    network = "Face detector, {arch},"
    paper = PaperTable(
        "ResNet-50 on WIDER FACE",
        tuple(scores),
        {
            "none": (95.49, 94.85, 89.87),
            "non_local": (95.88, 95.14, 91.94),
            "tesa": (96.22, 95.61, 92.58),
            "latent_gnn": (96.00, 95.31, 92.49),
            "efficient_nl": (96.06, 95.42, 92.55),
            "poly_nl": (96.37, 95.71, 92.76),
        },
    )
    detections_are = "folder"

    def __init__(self, config: FaceDetectionConfig, labels: Mapping[int, str] | None = None) -> None:
        self._model, self._data = config.model, config.data
        self._names = {FACE: "face"} if labels is None else dict(labels)
        self._loaded: dict[Split, Any] = {}

    def _load(self, split: Split) -> Any:
        if split not in self._loaded:
            self._loaded[split] = self._data.load(split)
        return self._loaded[split]

    @cached_property
    def _truth(self) -> GroundTruth:
        return self._data.truth(self._load("val"))

    def labels(self) -> dict[int, str]:
        """There is one."""
        return self._names

    def output_labels(self) -> dict[int, str]:
        """The network's one class has the number 0."""
        return {number - FACE: name for number, name in self._names.items()}

    def check(self, *, training: bool = True) -> None:
        """The data and the weights are there, and the detector can be built."""
        self._data.check(training=training)
        if not self._truth.count("hard"):
            raise SettingsError("no face on the images to score on counts as Hard, so nothing can be scored.")
        if training:
            self._load("train")
            self._model.check_files()
            self.model()

    def train_set(self) -> Images:
        """(patch as uint8, boxes and labels)."""
        return self._load("train")

    def val_set(self) -> Images:
        """(image as uint8, its name)."""
        return self._load("val")

    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """Images of any sizes, side by side."""
        good, bad = readable(samples, training=training)
        return Batch([image for image, _ in good], [target for _, target in good], bad)

    def model(self) -> nn.Module:
        """The detector."""
        return built(face_detector, **self._model.arguments())

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Focal loss and DIoU loss."""
        images = [image.float() / 255 for image in batch.images]
        # The network's one class has the number 0.
        faces = [{"boxes": target["boxes"], "labels": target["labels"] - FACE} for target in batch.targets]
        return model(images, faces)

    def detect(self, model: nn.Module, images: Sequence[Tensor]) -> list[Mapping[str, Tensor]]:
        """What the model, in eval mode, finds."""
        found = model([image.float() / 255 for image in images])
        return [{**one, "labels": one["labels"] + FACE} for one in found]

    def scorer(self) -> DetectionScorer:
        """WIDER FACE's AP."""
        return WiderFaceScorer(self)

    def predictions(self, model: nn.Module, batch: Batch) -> dict[Image, np.ndarray[Any, Any]]:
        """What the model finds in a batch of the images to score on, in pixels of the ground truth."""
        found = self.detect(model, batch.images)
        return {
            event_and_name(target["name"]): _rows(one, self._data.truth_scale)
            for target, one in zip(batch.targets, found, strict=True)
        }

    def read_detections(self, path: Path) -> Predictions:
        """A folder of text files, one for each image, of any program."""
        return read_predictions(path, self._truth)

    def score_detections(self, detections: Predictions) -> dict[str, float]:
        """The AP on the images that the detections are of."""
        return wider_face_scores(self._truth.only(detections), detections)


def _rows(found: Mapping[str, Tensor], scale: float) -> np.ndarray[Any, Any]:
    """x, y, width, height and score."""
    left_top, right_bottom = (found["boxes"].double() * scale).split(2, 1)
    scores = found["scores"].double()[:, None]
    return torch.cat([left_top, right_bottom - left_top, scores], 1).cpu().numpy()


class WiderFaceScorer:
    """Collects what is found; the first process puts it together and scores it."""

    def __init__(self, task: FaceDetection) -> None:
        self._task = task
        self._found: dict[Image, np.ndarray[Any, Any]] = {}

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Take in what is found in a batch."""
        self._found |= self._task.predictions(model, batch)

    def share(self) -> dict[Image, np.ndarray[Any, Any]]:
        """What was found, by image."""
        return self._found

    def compute(self, shares: Sequence[dict[Image, np.ndarray[Any, Any]]]) -> dict[str, float]:
        """The AP on the images of all processes."""
        self._found = {image: rows for share in shares for image, rows in share.items()}
        return self._task.score_detections(self._found)

    def save(self, path: Path) -> None:
        """Write text files in the official format; the first process has all of it."""
        write_predictions(path, self._found)
