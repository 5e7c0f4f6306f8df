"""COCO's average precision of boxes and masks, and the results files it is computed from."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from polynl.data.annotation_files import shown
from polynl.errors import SettingsError
from polynl.files import read_json, write_atomically
from polynl.tasks.detections import rle_as_text
from polynl.tasks.instance_segmentation.masks import encoded, wrong_segmentation

# An entry of a COCO results file: image_id, category_id, score, bbox [x, y, w, h] and, if there are masks,
# segmentation, an RLE whose counts are text.
Detection = dict[str, Any]

_IOU_TYPES = {"box": "bbox", "mask": "segm"}
_THRESHOLDS = slice(None)
# Where COCOeval keeps each score: the IoU thresholds of 0.5, 0.55, … 0.95, and the range of areas.
_SCORES: dict[str, tuple[slice | int, int]] = {
    "ap": (_THRESHOLDS, 0),
    "ap50": (0, 0),
    "ap75": (5, 0),
    "ap_small": (_THRESHOLDS, 1),
    "ap_medium": (_THRESHOLDS, 2),
    "ap_large": (_THRESHOLDS, 3),
}


@dataclass(frozen=True)
class CocoEvaluation:
    """COCO's AP in percent: `scores` over all categories, and the AP of each category by its name.

    A score without any object to find is in neither.
    """

    scores: dict[str, float]
    by_category: dict[str, dict[str, float]]


def coco_scores(
    ground_truth: Mapping[str, Any], detections: Sequence[Detection], image_ids: Iterable[int] | None = None
) -> dict[str, float]:
    """`CocoEvaluation.scores`: box_ap, box_ap50, … box_ap_large, and mask_ap, … if there are masks."""
    return coco_evaluation(ground_truth, detections, image_ids).scores


def coco_evaluation(
    ground_truth: Mapping[str, Any], detections: Sequence[Detection], image_ids: Iterable[int] | None = None
) -> CocoEvaluation:
    """Score detections against the content of a COCO file, on all its images or on `image_ids`.

    Boxes are scored from `bbox`, or from the mask's bounding box if there is none. Masks are scored, from
    `segmentation` alone, if all annotations and all detections have one. As in COCOeval, the first of several
    detections with the same score in an image counts as the better one, and categories that the ground truth
    does not have are not counted as mistakes.
    """
    images = _images(ground_truth, detections, image_ids)
    truth = [annotation for annotation in ground_truth["annotations"] if annotation["image_id"] in images]
    found = [detection for detection in detections if detection["image_id"] in images]
    names = {category["id"]: category["name"] for category in ground_truth["categories"]}
    masks = all(annotation.get("segmentation") for annotation in truth) and _all_have_masks(detections)
    scores: dict[str, float] = {}
    by_category: dict[str, dict[str, float]] = {}
    for kind in ("box", "mask") if masks else ("box",):
        precision = _precision(kind, images, names, truth, found)
        for score, (thresholds, area) in _SCORES.items():
            scores |= _percent(f"{kind}_{score}", precision[thresholds, ..., area, -1])
        for place, category in enumerate(sorted(names)):
            if ap := _percent(f"{kind}_ap", precision[:, :, place, 0, -1]):
                by_category.setdefault(names[category], {}).update(ap)
    return CocoEvaluation(scores, by_category)


def write_detections(path: Path, detections: Sequence[Detection]) -> None:
    """Write a COCO results file."""
    write_atomically(path, json.dumps(list(detections)) + "\n")


def read_detections(
    path: Path, ground_truth: Mapping[str, Any], *, left_out: Collection[int] = ()
) -> list[Detection]:
    """Read a COCO results file of any program; a SettingsError names the first wrong entry.

    Polygons and lists of run lengths become text. Keys that COCO does not score are dropped, and so are
    detections of the categories in `left_out`, which the ground truth does not have.
    """
    entries = _read_list(path)
    images = {image["id"]: image for image in ground_truth["images"]}
    categories = {category["id"] for category in ground_truth["categories"]} | set(left_out)
    found: list[Detection] = []
    for number, entry in enumerate(entries, 1):
        try:
            found.append(_checked(entry, images, categories))
            if ("segmentation" in found[-1]) != ("segmentation" in found[0]):
                raise _WrongError(
                    "only one of this entry and the first has a segmentation: give all entries one, or none."
                )
        except _WrongError as wrong:
            raise SettingsError(f"{path}, entry {number} of {len(entries)}: {wrong}") from None
    return [detection for detection in found if detection["category_id"] not in left_out]


# Scores


def _images(
    ground_truth: Mapping[str, Any], detections: Sequence[Detection], image_ids: Iterable[int] | None
) -> dict[int, Any]:
    """The images to score, by their ids."""
    images = {image["id"]: image for image in ground_truth["images"]}
    chosen = list(images) if image_ids is None else list(image_ids)
    for word, ids in (
        ("image_ids have", chosen),
        ("detections have image_id", [detection["image_id"] for detection in detections]),
    ):
        if unknown := set(ids) - set(images):
            raise SettingsError(f"{word} {min(unknown)}, which is not an image of the ground truth.")
    return {number: images[number] for number in chosen}


def _all_have_masks(detections: Sequence[Detection]) -> bool:
    masks = sum("segmentation" in detection for detection in detections)
    if 0 < masks < len(detections):
        raise SettingsError(
            f"{masks:,} of {len(detections):,} detections have a segmentation: give all of them one, or none."
        )
    return masks == len(detections)


def _precision(
    kind: str,
    images: Mapping[int, Any],
    names: Mapping[int, str],
    truth: Sequence[Mapping[str, Any]],
    found: Sequence[Detection],
) -> np.ndarray[Any, Any]:
    """COCOeval's precision at (IoU threshold, recall, category, range of areas, most detections)."""
    from faster_coco_eval import COCO, COCOeval_faster  # takes half a second to import

    for annotation in truth:
        # COCOeval_faster would count it as a small object, of area 0.
        if "area" not in annotation:
            raise SettingsError(f"annotation {annotation.get('id')} of the ground truth has no area.")
    data = {
        "images": [dict(image) for image in images.values()],
        "categories": [{"id": category} for category in names],
    }
    evaluation = COCOeval_faster(
        COCO({**data, "annotations": _numbered(truth)}),
        COCO({**data, "annotations": _numbered(_results(kind, found))}),
        _IOU_TYPES[kind],
    )
    evaluation.evaluate()
    evaluation.accumulate()
    return np.asarray(evaluation.eval["precision"])


def _numbered(annotations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies, which COCOeval may modify, with ids from 1: it never finds an object with the id 0."""
    return [{**annotation, "id": number} for number, annotation in enumerate(annotations, 1)]


def _box(detection: Detection) -> Detection:
    """As in loadRes: without a box, the mask's bounding box and area."""
    if "bbox" in detection:
        box = detection["bbox"]
        return {"bbox": box, "area": box[2] * box[3]}
    rle = detection["segmentation"]
    return {"bbox": coco_mask.toBbox(rle).tolist(), "area": int(coco_mask.area(rle))}


def _mask(detection: Detection) -> Detection:
    """Without the box, from which loadRes would take the area."""
    rle = detection["segmentation"]
    return {"segmentation": rle, "area": int(coco_mask.area(rle))}


_SCORED = {"box": _box, "mask": _mask}


def _results(kind: str, found: Iterable[Detection]) -> list[Detection]:
    """Detections as COCOeval reads them."""
    keys, scored = ("image_id", "category_id", "score"), _SCORED[kind]
    return [{**{key: one[key] for key in keys}, "iscrowd": 0, **scored(one)} for one in found]


def _percent(name: str, precision: np.ndarray[Any, Any]) -> dict[str, float]:
    """The mean over what there is to find, if anything."""
    found = precision[precision > -1]
    return {name: 100 * float(found.mean())} if found.size else {}


# Results files


class _WrongError(Exception):
    """What is wrong with an entry; the caller adds its number."""


def _read_list(path: Path) -> list[Any]:
    entries = read_json(path)
    if not isinstance(entries, list):
        raise SettingsError(
            f"{path} contains {shown(entries)}: expected a list of detections, as in COCO's results files."
        )
    return entries


def _checked(entry: Any, images: Mapping[int, Any], categories: set[int]) -> Detection:
    if not isinstance(entry, dict):
        raise _WrongError(
            f"expected an object with image_id, category_id, score and bbox, got {shown(entry)}."
        )
    found: Detection = {
        "image_id": _known(entry, "image_id", images, "images"),
        "category_id": _known(entry, "category_id", categories, "categories"),
        "score": _score(entry),
    }
    # Some programs write an empty list instead of leaving a key out, and loadRes accepts that.
    box, segmentation = entry.get("bbox"), entry.get("segmentation")
    if box in (None, []) and segmentation in (None, []):
        raise _WrongError("there is neither a bbox nor a segmentation.")
    if box not in (None, []):
        found["bbox"] = _checked_box(box)
    if segmentation not in (None, []):
        image = images[found["image_id"]]
        found["segmentation"] = _checked_rle(segmentation, image["height"], image["width"])
    return found


def _known(entry: Mapping[str, Any], key: str, known: Container[int], kind: str) -> int:
    if key not in entry:
        raise _WrongError(f"{key} is missing.")
    number = entry[key]
    if not _is_finite(number) or number not in known:
        raise _WrongError(f"{key} {shown(number)} is not one of the ground truth's {kind}.")
    return int(number)


def _score(entry: Mapping[str, Any]) -> float:
    if "score" not in entry:
        raise _WrongError("score is missing.")
    if not _is_finite(entry["score"]):
        raise _WrongError(f"score {shown(entry['score'])}: expected a finite number.")
    return float(entry["score"])


def _checked_box(box: Any) -> list[float]:
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_finite, box))):
        raise _WrongError(f"bbox {shown(box)}: expected four finite numbers x, y, width, height.")
    if box[2] < 0 or box[3] < 0:
        raise _WrongError(
            f"bbox {box} has a negative width or height: expected x, y, width, height, not two corners."
        )
    return box


def _checked_rle(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """The mask as an RLE whose counts are text.

    A mask that does not cover the image is an error, because COCOeval would never end on it.
    """
    if wrong := wrong_segmentation(segmentation, height, width):
        raise _WrongError(f"{wrong}.")
    return rle_as_text(encoded(segmentation, height, width))


def _is_finite(number: Any) -> bool:
    """Whether it is a number that is finite, also as a float."""
    return type(number) in (int, float) and abs(number) <= sys.float_info.max
