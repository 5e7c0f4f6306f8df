"""WIDER FACE's average precision of its Easy, Medium and Hard faces.

The protocol, with boxes x, y, w, h:

1. The scores of all detections of all images are brought to 0 … 1 together: the lowest becomes 0, the
   highest 1.
2. A detection belongs to the face of its image that it overlaps most, of equal ones the first, if their IoU
   is at least 0.5, and else to none. Its far corner is (x + w, y + h) and belongs to the box as a pixel does:
   a box is w + 1 wide and h + 1 high.
3. A subset counts some of an image's faces; the others are ignored. A detection that belongs to an ignored
   face is no detection. A counted face is found once; further detections of it are mistakes, as are those
   that belong to no face.
4. At each of the thresholds 0.999, 0.998, … 0, over all images: recall = found faces ÷ counted faces,
   precision = found faces ÷ detections, both by the detections whose score reaches the threshold.
5. AP = the area below the precision made monotone: at each recall, the best at this recall or beyond.

A detection's face does not depend on other detections. So a face is found at every threshold up to the best
score that belongs to it, and two counts of sorted scores are the whole curve: nothing is matched threshold by
threshold, and the order of detections is of no importance.

Two programs are in use: the official one in Matlab, and a Python port (WiderFace-Evaluation), by which many
results are published. They agree with each other and with this module for scores in 0 … 1, sorted in the
files. Where they do not, this is done here:

- Order: Matlab sorts the detections of an image by their scores; the port takes the order of the file and is
  wrong for unsorted ones. Here any order gives what the sorted one gives.
- Range of scores: where all are above 1 the port takes 1 for the lowest, where all are below 0 it takes 0 for
  the highest, and fewer thresholds separate what is left; Matlab does the latter only. Here the range is that
  of the scores, so that scaling or shifting them changes nothing.
- All scores equal: both divide by zero and find nothing. Here all detections reach every threshold, so that
  the curve has one point.
- Images without any face: both leave out their detections; so does this.
- An image without predictions: Matlab takes it for one without detections, the port stops; so does this.
- Arithmetic: the port's is in float64, as here. Not every copy of the Matlab code turns the faces, which are
  int32, to double; without it Matlab rounds overlaps to 0 or 1, and the first face above 0.5 is taken.

One of the official Hard faces is -2 wide and overlaps nothing: no detector finds more than 31,957 of 31,958.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from polynl.errors import SettingsError, near_matches
from polynl.tasks.detections import Detections

SUBSETS = ("easy", "medium", "hard")

Array = np.ndarray[Any, Any]
# An image is its event and its name without suffix: ("0--Parade", "0_Parade_marchingband_1_465").
Image = tuple[str, str]
# For each image an array (k, 5) of x, y, w, h, score.
Predictions = Mapping[Image, Array]

THRESHOLDS = 1 - np.arange(1, 1001) / 1000
_MIN_IOU = 0.5
# Detections × faces compared at a time, which bounds the memory at some 10 MB an array.
_MOST_PAIRS = 1 << 20


@dataclass(frozen=True, eq=False)
class Faces:
    """The faces of an image: boxes (n, 4) as x, y, w, h, and the rows that count in each subset."""

    boxes: Array
    counted: Mapping[str, Array]


class GroundTruth(dict[Image, Faces]):
    """The faces of each image, (event, name)."""

    @property
    def events(self) -> list[str]:
        """Every event once, in the order of the images."""
        return list(dict.fromkeys(event for event, _ in self))

    def count(self, subset: str) -> int:
        """The number of faces that count in a subset."""
        return sum(len(faces.counted[subset]) for faces in self.values())

    def only(self, images: Iterable[Image]) -> GroundTruth:
        """The ground truth of these images."""
        chosen = set(images)
        for image in sorted(chosen):
            _check_known(image, self, "an image to score")
        return GroundTruth({image: faces for image, faces in self.items() if image in chosen})


@dataclass(frozen=True)
class WiderFaceEvaluation:
    """The AP of each subset, from 0 to 1, and its curve (recall, precision) along falling thresholds.

    A curve starts at the first threshold with a detection. A subset without faces is in neither.
    """

    ap: dict[str, float]
    curves: dict[str, tuple[Array, Array]]


def wider_face_rows(found: Detections, scale: float = 1.0) -> Array:
    """Detections as rows (k, 5) of x, y, w, h, score, the boxes scaled."""
    scaled = replace(found, boxes=found.boxes.double() * scale)
    return torch.cat([scaled.xywh(), found.scores.double()[:, None]], 1).cpu().numpy()


def wider_face_scores(truth: GroundTruth, predictions: Predictions) -> dict[str, float]:
    """AP in percent: easy_ap, medium_ap, hard_ap, except for subsets without faces."""
    ap = wider_face_evaluation(truth, predictions).ap
    return {f"{subset}_ap": 100 * value for subset, value in ap.items()}


def wider_face_evaluation(truth: GroundTruth, predictions: Predictions) -> WiderFaceEvaluation:
    """Score predictions for exactly the images of the ground truth, with the protocol above.

    >>> boxes = np.array([[10.0, 10, 20, 20], [50, 10, 4, 4]])  # one large face, one that only Hard counts
    >>> counted = {"easy": np.array([0]), "medium": np.array([0]), "hard": np.array([0, 1])}
    >>> truth = GroundTruth({("0--Parade", "band"): Faces(boxes, counted)})
    >>> found = np.array([[11, 10, 20, 20, 0.9], [80, 80, 9, 9, 0.5]])  # the large one, and a mistake
    >>> wider_face_evaluation(truth, {("0--Parade", "band"): found}).ap
    {'easy': 1.0, 'medium': 1.0, 'hard': 0.5}
    """
    found, evaluation = find_faces(truth, predictions), WiderFaceEvaluation({}, {})
    for subset, counts in found.counts.items():
        if counts.any():
            ignored = (found.face >= 0) & ~np.append(counts, False)[found.face]
            recall, precision = evaluation.curves[subset] = _curve(found.best[counts], found.score[~ignored])
            best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
            evaluation.ap[subset] = float((np.diff(recall, prepend=0.0) * best_from_here).sum())
    return evaluation


@dataclass(frozen=True, eq=False)
class FoundFaces:
    """What the detections of images with faces are, and when the faces are found, numbered over all images.

    Scores are from 0 to 1.
    """

    image: Array
    """The place of each detection's image in the ground truth."""
    face: Array
    """The face that each detection belongs to, or -1."""
    score: Array
    """The score of each detection."""
    best: Array
    """The best score of each face's detections, or -1."""
    counts: Mapping[str, Array]
    """Whether each face counts in each subset."""


def find_faces(truth: GroundTruth, predictions: Predictions) -> FoundFaces:
    """Match predictions for exactly the images of the ground truth; steps 1 and 2 of the protocol."""
    for image in predictions:
        _check_known(image, truth, "an image of the predictions")
    if missing := [image for image in truth if image not in predictions]:
        raise SettingsError(
            f"{'/'.join(missing[0])} has no predictions ({len(missing):,} of {len(truth):,} images have "
            "none): if nothing is found, pass an array of shape (0, 5)."
        )
    found = {image: checked_detections(image, predictions[image]) for image in truth}
    images, face, score = _matches(truth, found)
    best = np.full(sum(len(faces.boxes) for faces in truth.values()), -1.0)
    np.maximum.at(best, face[face >= 0], score[face >= 0])
    return FoundFaces(images, face, score, best, {subset: _counts(truth, subset) for subset in SUBSETS})


def checked_detections(image: Image, detections: Any) -> Array:
    """Float64 (k, 5); a SettingsError names the first wrong row."""
    array = np.asarray(detections, dtype=np.float64)
    if array.size == 0:
        return np.zeros((0, 5))
    name = "/".join(image)
    if array.ndim != 2 or array.shape[1] != 5:
        raise SettingsError(
            f"predictions of {name} have the shape {array.shape}: expected (k, 5), x, y, w, h, score."
        )
    wrong = ~np.isfinite(array).all(1) | (array[:, 2:4] < 0).any(1)
    if wrong.any():
        row = int(wrong.argmax())
        raise SettingsError(
            f"predictions of {name}, row {row} is {array[row].tolist()}: expected finite x, y, w, h, score, "
            "with w and h not negative."
        )
    return array


def _check_known(image: Image, truth: GroundTruth, what: str) -> None:
    if image not in truth:
        names = ["/".join(known) for known in truth]
        raise SettingsError(
            f"{what} is {image!r}, which is not in the ground truth (event, name without suffix)."
            f"{near_matches('/'.join(map(str, image)), names)}"
        )


def _matches(truth: GroundTruth, found: Predictions) -> tuple[Array, Array, Array]:
    """For each detection in an image with faces: the image, its face or -1, and its score."""
    nothing = np.zeros(0, dtype=np.intp)
    images, places, scores = [nothing], [nothing], [np.zeros(0)]
    first = 0
    for number, (image, faces) in enumerate(truth.items()):
        if len(faces.boxes) and len(found[image]):
            best = _best_faces(found[image][:, :4], faces.boxes)
            images.append(np.full(len(best), number))
            places.append(np.where(best >= 0, best + first, -1))
            scores.append(found[image][:, 4])
        first += len(faces.boxes)
    score = np.concatenate(scores)
    everywhere = np.concatenate([np.zeros((0, 5)), *found.values()])[:, 4]
    low, high = (everywhere.min(), everywhere.max()) if len(everywhere) else (0.0, 0.0)
    score = (score - low) / (high - low) if high > low else np.ones_like(score)
    return np.concatenate(images), np.concatenate(places), score


def _best_faces(detections: Array, faces: Array) -> Array:
    """For each of the boxes (k, 4) the row of the face that it overlaps most, or -1."""
    rows = max(1, _MOST_PAIRS // len(faces))
    slabs = (_overlaps(detections[at : at + rows], faces) for at in range(0, len(detections), rows))
    return np.concatenate([np.where(slab.max(1) >= _MIN_IOU, slab.argmax(1), -1) for slab in slabs])


def _overlaps(detections: Array, faces: Array) -> Array:
    """IoU (k, n) of boxes x, y, w, h whose far corners are pixels of theirs."""
    # Both axes at once, the first of each array: (2, k, 1) and (2, 1, n).
    start, other_start = detections.T[:2, :, None], faces.T[:2, None]
    end, other_end = start + detections.T[2:, :, None], other_start + faces.T[2:, None]
    shared = np.minimum(end, other_end) - np.maximum(start, other_start) + 1
    # Without the test for both, two negative sides would make an area.
    common = np.where((shared > 0).all(0), shared.prod(0), 0.0)
    union = (end - start + 1).prod(0) + (other_end - other_start + 1).prod(0) - common
    return np.divide(common, union, out=np.zeros_like(common), where=common > 0)


def _counts(truth: GroundTruth, subset: str) -> Array:
    """Whether each face, numbered over all images, counts."""
    parts = [np.isin(np.arange(len(faces.boxes)), faces.counted[subset]) for faces in truth.values()]
    return np.concatenate([np.zeros(0, dtype=bool), *parts])


def _curve(best: Array, scores: Array) -> tuple[Array, Array]:
    """Recall and precision of counted faces by their best scores and of detections by theirs."""
    found, detections = (
        len(values) - np.searchsorted(np.sort(values), THRESHOLDS, side="left") for values in (best, scores)
    )
    some = detections > 0
    return found[some] / len(best), found[some] / detections[some]
