"""Face detection: RetinaNet's losses, WIDER FACE's AP of Easy, Medium and Hard faces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polynl.config import errors_at
from polynl.errors import SettingsError
from polynl.tasks.base import Batch, DetectionTask, PaperTable
from polynl.tasks.detections import Detections
from polynl.tasks.face_detection.config import FaceDetectionConfig
from polynl.tasks.face_detection.data import event_and_name
from polynl.tasks.face_detection.files import read_predictions, write_predictions
from polynl.tasks.face_detection.metric import (
    GroundTruth,
    Image,
    Predictions,
    wider_face_rows,
    wider_face_scores,
)
from polynl.tasks.face_detection.outcomes import score_wider_face, wider_face_outcomes
from polynl.tasks.outcomes import Array, Outcomes

FACE = 1


class FaceDetection(DetectionTask):
    """Scored by WIDER FACE's AP of Easy, Medium and Hard faces, in percent."""

    name = "face_detection"
    config = FaceDetectionConfig
    scores = {"easy_ap": "Easy AP", "medium_ap": "Medium AP", "hard_ap": "Hard AP"}  # noqa: RUF012
    best_by = "hard_ap"
    extra = "detect"
    headline = ("easy_ap", "medium_ap", "hard_ap")
    network = "Face detector, {arch},"
    paper = PaperTable(
        "ResNet-50 on WIDER FACE",
        tuple(scores),
        source="wider_face",
        images=3_226,
        rows={
            "none": (95.49, 94.85, 89.87),
            "non_local": (95.88, 95.14, 91.94),
            "tesa": (96.22, 95.61, 92.58),
            "latent_gnn": (96.00, 95.31, 92.49),
            "efficient_nl": (96.06, 95.42, 92.55),
            "poly_nl": (96.37, 95.71, 92.76),
        },
    )
    detections_are = "folder"

    @cached_property
    def _truth(self) -> GroundTruth:
        return self._data.truth(self._load("val"))

    def labels(self) -> dict[int, str]:
        """The only category."""
        return {FACE: "face"} if self._labels is None else self._labels

    def output_labels(self) -> dict[int, str]:
        """The network's only class has the number 0."""
        return {number - FACE: name for number, name in self.labels().items()}

    def check(self, *, training: bool = True) -> None:
        """Raise a SettingsError if data or weights are missing, or if the detector cannot be built."""
        super().check(training=training)
        if not self._truth.count("hard"):
            raise SettingsError(
                "no face on the images to score on counts as Hard: there is nothing to score."
            )
        if training:
            self._load("train")
            self.model()

    def model(self) -> nn.Module:
        """The detector."""
        with errors_at("model"):
            return self._model.build()

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Focal loss and DIoU loss."""
        images = [image.float() / 255 for image in batch.images]
        # The network's only class has the number 0.
        faces = [{"boxes": target["boxes"], "labels": target["labels"] - FACE} for target in batch.targets]
        return model(images, faces)

    def detect(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detections]:
        """Boxes of faces."""
        found = model([image.float() / 255 for image in images])
        return [Detections(one["boxes"], one["scores"], one["labels"] + FACE) for one in found]

    def by_image(self, targets: Sequence[Any], found: Sequence[Detections]) -> dict[Image, Array]:
        """Rows (k, 5) of x, y, w, h, score in pixels of the ground truth, by event and name."""
        return {
            event_and_name(target["name"]): wider_face_rows(one, self._data.truth_scale)
            for target, one in zip(targets, found, strict=True)
        }

    def read_detections(self, path: Path) -> dict[Image, Array]:
        """A folder of text files, one for each image, of any program."""
        return dict(read_predictions(path, self._truth))

    def write_detections(self, path: Path, detections: Predictions) -> None:
        """A folder of text files in the official format."""
        write_predictions(path, detections)

    def score_detections(self, detections: Predictions) -> dict[str, float]:
        """WIDER FACE's AP."""
        return wider_face_scores(self._truth.only(detections), detections)

    def outcomes(self, detections: Predictions) -> Outcomes:
        """When each face and each mistake appears."""
        return wider_face_outcomes(self._truth.only(detections), detections)

    @classmethod
    def score_outcomes(cls, outcomes: Outcomes, weights: Array) -> dict[str, Array]:
        """WIDER FACE's AP."""
        return score_wider_face(outcomes, weights)
