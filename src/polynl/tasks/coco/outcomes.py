"""COCO's average precision of any choice of images, from which objects were found in each of them.

COCOeval matches detections with objects image by image, and only then adds images up. So its matches are
kept, and added up for images that count more than once or not at all.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polynl.tasks.coco.metric import Detection, coco_inputs
from polynl.tasks.outcomes import Array, Outcomes

THRESHOLDS, RECALLS = 10, np.linspace(0, 1, 101)
KINDS = {"box": "bbox", "mask": "segm"}


def coco_outcomes(
    ground_truth: Mapping[str, Any], detections: Sequence[Detection], image_ids: Iterable[int] | None = None
) -> Outcomes:
    """The matches of detections, as `coco_evaluation` has them, over objects of all sizes.

    Of boxes and of masks: the detections' images, categories and scores, and for each IoU threshold whether
    they are right or wrong (neither: ignored). `truth` counts the objects, (images, categories).
    """
    inputs = coco_inputs(ground_truth, detections, image_ids)
    names = np.array(sorted(f"{number:012}" for number in inputs.images))
    place = {int(name): number for number, name in enumerate(names)}
    categories = {category: number for number, category in enumerate(sorted(inputs.names))}
    truth = np.zeros((len(names), len(categories)), dtype=np.int32)
    for annotation in inputs.truth:
        if not annotation.get("iscrowd"):
            truth[place[annotation["image_id"]], categories[annotation["category_id"]]] += 1
    arrays: dict[str, Array] = {}
    for kind in inputs.kinds:
        for name, parts in _matches(kind, *inputs.annotations(kind), place, categories).items():
            arrays[f"{kind}_{name}"] = parts
    return Outcomes(names, truth, arrays)


def _matches(
    kind: str, truth: Any, found: Any, place: Mapping[int, int], categories: Mapping[int, int]
) -> dict[str, Array]:
    """COCOeval's matches as flat arrays, best scores first."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images: list[Array] = [np.zeros(0, dtype=np.int32)]
    kinds, scores, right, wrong = (
        [images[0]],
        [np.zeros(0)],
        *([np.zeros((0, THRESHOLDS), bool)] for _ in "rw"),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        data = []
        for content in (truth, found):
            data.append(COCO())
            data[-1].dataset = content
            data[-1].createIndex()
        evaluation = COCOeval(*data, KINDS[kind])
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
    for one in filter(None, evaluation.evalImgs):
        count = len(one["dtScores"])
        images.append(np.full(count, place[one["image_id"]], dtype=np.int32))
        kinds.append(np.full(count, categories[one["category_id"]], dtype=np.int32))
        scores.append(np.asarray(one["dtScores"], dtype=float))
        matched, ignored = (np.asarray(one[key], dtype=bool).T for key in ("dtMatches", "dtIgnore"))
        right.append(matched & ~ignored)
        wrong.append(~matched & ~ignored)
    names = ("image", "category", "score", "right", "wrong")
    parts = map(np.concatenate, (images, kinds, scores, right, wrong))
    arrays = dict(zip(names, parts, strict=True))
    # As COCOeval does; of equal scores, the image that comes first.
    order = np.argsort(-arrays["score"], kind="stable")
    return {name: values[order] for name, values in arrays.items()}


def score_coco(outcomes: Outcomes, weights: Array) -> dict[str, Array]:
    """box_ap, box_ap50, box_ap75 and those of masks, for every row of weights."""
    scores = {}
    for kind in KINDS:
        if f"{kind}_score" in outcomes.arrays:
            # (rows, categories, thresholds); a category without an object has none.
            precision = np.stack(list(_average_precision(kind, outcomes, weights)), 1)
            for name, chosen in (("ap", slice(None)), ("ap50", slice(0, 1)), ("ap75", slice(5, 6))):
                scores[f"{kind}_{name}"] = 100 * _mean_of_what_there_is(precision[..., chosen])
    return scores


def _mean_of_what_there_is(precision: Array) -> Array:
    """The mean of each row over categories that have an object; NaN if none has."""
    there = ~np.isnan(precision)
    return np.where(there, precision, 0).sum((1, 2)) / np.where(there.any((1, 2)), there.sum((1, 2)), np.nan)


def _average_precision(kind: str, outcomes: Outcomes, weights: Array) -> Iterator[Array]:
    """(rows, thresholds) of every category that has an object."""
    image, category, right, wrong = (
        outcomes.arrays[f"{kind}_{name}"] for name in ("image", "category", "right", "wrong")
    )
    for number in np.flatnonzero(outcomes.truth.sum(0)):
        of_it = category == number
        objects = weights @ outcomes.truth[:, number]
        yield np.stack(
            [
                _weighted_precision(row[image[of_it]], right[of_it], wrong[of_it], count)
                for row, count in zip(weights, objects, strict=True)
            ]
        )


def _weighted_precision(weights: Array, right: Array, wrong: Array, objects: float) -> Array:
    """The mean over recalls of the best precision at this recall or beyond, for every threshold."""
    if objects == 0:
        return np.full(right.shape[1], np.nan)
    found, mistakes = (np.cumsum(weights[:, None] * part, 0) for part in (right, wrong))
    precision = found / np.maximum(found + mistakes, np.spacing(1))
    best = np.maximum.accumulate(precision[::-1], 0)[::-1]
    best = np.concatenate([best, np.zeros((1, best.shape[1]))])
    recall = found / objects
    places = [np.searchsorted(column, RECALLS, side="left") for column in recall.T]
    return np.array([best[place, number].mean() for number, place in enumerate(places)])
