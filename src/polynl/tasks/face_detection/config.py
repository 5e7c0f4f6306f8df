"""The keys of face detection: WIDER FACE's files or scenes, the detector."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from polynl.config import NEUTRAL, Side
from polynl.data.config import Drawn, DrawnConfig, Split
from polynl.errors import SettingsError
from polynl.tasks.config import AnnotatedConfig, FlipConfig, FromScenes, TaskConfig
from polynl.tasks.face_detection.data import FaceImages, counts, event_and_name, read_faces
from polynl.tasks.face_detection.files import read_ground_truth
from polynl.tasks.face_detection.metric import Faces, GroundTruth
from polynl.tasks.face_detection.model import FaceDetectorConfig
from polynl.tasks.face_detection.scenes import FaceScenes
from polynl.tasks.face_detection.transforms import FacePatch, PatchConfig


class WiderFaceConfig(AnnotatedConfig):
    """WIDER FACE in its official layout."""

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
    patch: PatchConfig = PatchConfig()

    def check(self, *, training: bool) -> None:
        """Raise a SettingsError if a folder or file is missing."""
        super().check(training=training)
        if self.ground_truth is not None and not self.ground_truth.is_dir():
            raise SettingsError(f"data.ground_truth: no such folder: {self.ground_truth}.")
        if self.ground_truth is None and self.truth_scale != 1:
            raise SettingsError(
                f"data.truth_scale: {self.truth_scale:g} needs data.ground_truth, which is not given."
            )

    def load(self, split: Split) -> FaceImages:
        """The images and checked annotations of a split."""
        file, folder = self.places(split)
        train, faces = split == "train", read_faces(file, folder)
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
        if self.ground_truth is not None:
            return read_ground_truth(self.ground_truth).only(map(event_and_name, images.names))
        truth, nothing = GroundTruth(), np.zeros(0, dtype=np.int64)
        for image in read_faces(*self.places("val")):
            (valid,) = np.nonzero(image.usable.numpy())
            counted = {"easy": nothing, "medium": nothing, "hard": valid}
            truth[event_and_name(image.name)] = Faces(image.boxes.numpy(), counted)
        return truth


class FaceScenesConfig(FlipConfig, DrawnConfig, FromScenes):
    """Faces drawn from a seed: nothing to download."""

    truth_scale: ClassVar = 1.0  # scenes have the size of their ground truth

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
    data: Annotated[WiderFaceConfig | FaceScenesConfig, Field(discriminator="source")]
