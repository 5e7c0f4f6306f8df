"""The keys of face detection: WIDER FACE's files, COCO's or scenes, the detector."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from polynl.config import NEUTRAL, Side
from polynl.data.config import Drawn, DrawnConfig, Split
from polynl.errors import SettingsError, shortened
from polynl.tasks.coco.annotations import only, read_annotations
from polynl.tasks.config import AnnotatedConfig, FlipConfig, FromScenes, TaskConfig
from polynl.tasks.face_detection.data import (
    FaceImage,
    FaceImages,
    counts,
    event_and_name,
    faces_of,
    read_faces,
)
from polynl.tasks.face_detection.files import read_ground_truth
from polynl.tasks.face_detection.metric import Faces, GroundTruth
from polynl.tasks.face_detection.model import FaceDetectorConfig
from polynl.tasks.face_detection.scenes import FaceScenes
from polynl.tasks.face_detection.transforms import FacePatch, PatchConfig


class FaceFilesConfig(AnnotatedConfig):
    """Images on disk; all valid faces count as Hard, and there are no others."""

    patch: PatchConfig = PatchConfig()

    @abstractmethod
    def faces(self, split: Split) -> list[FaceImage]:
        """The checked annotations of a split."""

    def load(self, split: Split) -> FaceImages:
        """The images and checked annotations of a split."""
        train, faces = split == "train", self.faces(split)
        file, folder = self.places(split)
        if train and not any(image.usable.any() for image in faces):
            raise SettingsError(f"{file} has no face to train on: {counts(faces)}.")
        return FaceImages(
            faces,
            folder,
            training=train,
            transform=FacePatch(self.patch, flip=self.flip) if train else None,
            on_bad_image=self.on_bad_image,
        )

    def truth(self, images: FaceImages) -> GroundTruth:
        """The faces on the images to score on."""
        truth, nothing = GroundTruth(), np.zeros(0, dtype=np.int64)
        for image in self.faces("val"):
            (valid,) = np.nonzero(image.usable.numpy())
            counted = {"easy": nothing, "medium": nothing, "hard": valid}
            truth[event_and_name(image.name)] = Faces(image.boxes.numpy(), counted)
        return truth


class WiderFaceConfig(FaceFilesConfig):
    """WIDER FACE in its official layout."""

    about: ClassVar[str] = (
        "Images of people. Every face is to be found, with its box; Easy, Medium and Hard are WIDER FACE's "
        "sets of faces, each of which contains the one before it."
    )
    source: Literal["wider_face"]
    train: str = "WIDER_train/images"
    val: str = "WIDER_val/images"
    train_annotations: str = "wider_face_split/wider_face_train_bbx_gt.txt"
    val_annotations: str = "wider_face_split/wider_face_val_bbx_gt.txt"
    ground_truth: Path | None = Field(None, json_schema_extra=NEUTRAL)
    """Folder of the official .mat files, which say which faces are Easy, Medium and Hard.

    Without it all valid faces count as Hard, and there are no others.
    """
    truth_scale: float = Field(1.0, gt=0)
    """Factor from boxes to those of `ground_truth`: 2 for images at half size."""

    def check(self, *, training: bool) -> None:
        """Raise a SettingsError if a folder or file is missing."""
        super().check(training=training)
        if self.ground_truth is not None and not self.ground_truth.is_dir():
            raise SettingsError(f"data.ground_truth: no such folder: {self.ground_truth}.")
        if self.ground_truth is None and self.truth_scale != 1:
            raise SettingsError(
                f"data.truth_scale: {self.truth_scale:g} needs data.ground_truth, which is not given."
            )

    def faces(self, split: Split) -> list[FaceImage]:
        """The faces of the official text file."""
        return read_faces(*self.places(split))

    def truth(self, images: FaceImages) -> GroundTruth:
        """The faces on the images to score on, those of `ground_truth` if it is given."""
        if self.ground_truth is None:
            return super().truth(images)
        return read_ground_truth(self.ground_truth).only(map(event_and_name, images.names))


class CocoFacesConfig(FaceFilesConfig):
    """Images on disk with boxes of faces in COCO's format."""

    about: ClassVar[str] = (
        "Images of people. Every face is to be found, with its box; all faces count as Hard."
    )
    truth_scale: ClassVar[float] = 1.0  # boxes are scored as the file has them

    source: Literal["coco"]
    train: str = "train"
    val: str = "val"
    train_annotations: str = "annotations/instances_train.json"
    val_annotations: str = "annotations/instances_val.json"
    categories: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the categories that are faces; needed only if the file has several."""

    def faces(self, split: Split) -> list[FaceImage]:
        """The boxes of the file; crowds are invalid."""
        annotations = read_annotations(*self.places(split), masks=False)
        if self.categories is not None:
            annotations = only(annotations, self.categories)
        elif len(annotations.categories) > 1:
            names = list(annotations.categories.values())
            raise SettingsError(
                f"{annotations.path} has {len(names)} categories ({shortened(names)}), and faces are one.",
                hint=f' Say which are faces: --data.categories "[{names[0]}]"',
            )
        return faces_of(annotations)


class FaceScenesConfig(FlipConfig, DrawnConfig, FromScenes):
    """Faces drawn from a seed: nothing to download."""

    about: ClassVar[str] = (
        "Drawn scenes with faces among other shapes. Every face is to be found, with its box; Easy, Medium "
        "and Hard faces are at least 25, 15 and 5 pixels high."
    )
    truth_scale: ClassVar[float] = 1.0  # scenes have the size of their ground truth

    images: Drawn = 1_000
    val_images: Drawn = 100
    size: Annotated[Side, Field(ge=32)] = 256
    patch: PatchConfig = PatchConfig(size=128, scale=(0.4, 1.0))

    def load(self, split: Split) -> FaceScenes:
        """The scenes of a split."""
        train = split == "train"
        patches = FacePatch(self.patch, flip=self.flip) if train else None
        return FaceScenes(**self.drawn_from(split), training=train, transform=patches)

    def truth(self, images: FaceScenes) -> GroundTruth:
        """The faces on the scenes to score on."""
        return images.ground_truth()


class FaceDetectionConfig(TaskConfig):
    """Images with faces in them."""

    model: FaceDetectorConfig = FaceDetectorConfig()
    data: Annotated[WiderFaceConfig | CocoFacesConfig | FaceScenesConfig, Field(discriminator="source")]
