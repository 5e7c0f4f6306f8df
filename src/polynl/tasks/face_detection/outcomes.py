"""WIDER FACE's AP of any choice of images, from the thresholds at which faces and mistakes appear in each.

Scores are brought to 0 … 1 over all images once, not for every choice of images.
"""

from __future__ import annotations

import numpy as np

from polynl.tasks.face_detection.metric import SUBSETS, THRESHOLDS, GroundTruth, Predictions, find_faces
from polynl.tasks.outcomes import Array, Outcomes


def wider_face_outcomes(truth: GroundTruth, predictions: Predictions) -> Outcomes:
    """For every face and every detection: its image, the first threshold it reaches, where it counts.

    `truth` counts the faces of each subset, (images, subsets).
    """
    names = np.array(["/".join(image) for image in truth])
    order = np.argsort(names, kind="stable")
    place = np.argsort(order, kind="stable")
    found = find_faces(truth, predictions)
    counted = np.stack([found.counts[subset] for subset in SUBSETS], 1)
    faces = np.repeat(place, [len(one.boxes) for one in truth.values()])
    # A detection of a face that does not count is no detection; the last row is that of no face.
    of_face = np.concatenate([counted, np.ones((1, len(SUBSETS)), dtype=bool)])[found.face]
    numbers = np.zeros((len(truth), len(SUBSETS)), dtype=np.int32)
    np.add.at(numbers, faces, counted)
    arrays = {
        "face_image": faces,
        "face_level": _levels(found.best),
        "face_counts": counted,
        "detection_image": place[found.image],
        "detection_level": _levels(found.score),
        "detection_counts": of_face,
    }
    return Outcomes(names[order], numbers, arrays)


def _levels(scores: Array) -> Array:
    """The first threshold that each score reaches, or their number if it reaches none."""
    return np.searchsorted(-THRESHOLDS, -scores, side="left").astype(np.int16)


def score_wider_face(outcomes: Outcomes, weights: Array) -> dict[str, Array]:
    """easy_ap, medium_ap and hard_ap, for every row of weights, except for subsets without faces."""
    scores = {}
    for number, subset in enumerate(SUBSETS):
        if outcomes.truth[:, number].any():
            found, detections = (_reached(outcomes, kind, number, weights) for kind in ("face", "detection"))
            faces = weights @ outcomes.truth[:, number]
            faces = np.where(faces > 0, faces, np.nan)  # nothing to find, no score
            recall = found / faces[:, None]
            precision = found / np.maximum(detections, np.spacing(1))
            best = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
            scores[f"{subset}_ap"] = 100 * (np.diff(recall, prepend=0.0) * best).sum(1)
    return scores


def _reached(outcomes: Outcomes, kind: str, subset: int, weights: Array) -> Array:
    """How many faces or detections reach each threshold, (rows, thresholds)."""
    image, level, counts = (outcomes.arrays[f"{kind}_{name}"] for name in ("image", "level", "counts"))
    first = np.zeros((len(outcomes), len(THRESHOLDS) + 1))
    np.add.at(first, (image[counts[:, subset]], level[counts[:, subset]]), 1.0)
    return np.cumsum(weights @ first[:, :-1], 1)
