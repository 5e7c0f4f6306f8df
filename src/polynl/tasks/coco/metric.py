"""COCO's average precision of boxes and masks, and the results files it is computed from."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from polynl.errors import SettingsError, shown
from polynl.files import read_json, write_atomically
from polynl.tasks.coco.annotations import (
    Checks,
    encoded,
    one_of,
    wrong_field,
    wrong_segmentation,
)
from polynl.tasks.detections import rle_as_text

# An entry of a COCO results file: image_id, category_id, score, bbox [x, y, w, h] and, if there are masks,
# segmentation, an RLE whose counts are text.
Detection = dict[str, Any]

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
    inputs = coco_inputs(ground_truth, detections, image_ids)
    scores: dict[str, float] = {}
    by_category: dict[str, dict[str, float]] = {}
    for kind in inputs.kinds:
        precision = _precision(kind, inputs)
        for score, (thresholds, area) in _SCORES.items():
            scores |= _percent(f"{kind}_{score}", precision[thresholds, ..., area, -1])
        for place, category in enumerate(sorted(inputs.names)):
            if ap := _percent(f"{kind}_ap", precision[:, :, place, 0, -1]):
                by_category.setdefault(inputs.names[category], {}).update(ap)
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
    entries = read_json(path)
    if not isinstance(entries, list):
        raise SettingsError(
            f"{path} contains {shown(entries)}: expected a list of detections, as in COCO's results files."
        )
    images = {image["id"]: image for image in ground_truth["images"]}
    categories = {category["id"] for category in ground_truth["categories"]} | set(left_out)
    checks: Checks = {
        "image_id": one_of(images, "ground truth's images", (int, float)),
        "category_id": one_of(categories, "ground truth's categories", (int, float)),
        "score": (_is_finite, "a finite number"),
        "bbox": (_is_box, "finite x, y, width, height, the last two not negative"),
    }
    found: list[Detection] = []
    for place, entry in enumerate(entries, 1):
        if isinstance(entry, dict):
            # Some programs write an empty list instead of leaving a key out, and loadRes accepts that.
            entry = {key: value for key, value in entry.items() if value not in (None, [])}
        wrong = wrong_field(entry, checks, optional=("bbox",)) or _wrong_shape(entry, images, found[:1])
        if wrong:
            raise SettingsError(f"{path}, entry {place} of {len(entries)}: {wrong}.")
        number = int(entry["image_id"])
        one: Detection = {"image_id": number, "category_id": int(entry["category_id"])}
        one["score"] = float(entry["score"])
        if "bbox" in entry:
            one["bbox"] = entry["bbox"]
        if "segmentation" in entry:
            one["segmentation"] = rle_as_text(encoded(entry["segmentation"], images[number]))
        found.append(one)
    return [detection for detection in found if detection["category_id"] not in left_out]


def _wrong_shape(entry: Detection, images: Mapping[int, Any], first: Sequence[Detection]) -> str | None:
    """What is wrong with the mask; one that does not cover the image would keep COCOeval busy forever."""
    masked = "segmentation" in entry
    if not masked and "bbox" not in entry:
        return "there is neither a bbox nor a segmentation"
    if first and masked != ("segmentation" in first[0]):
        return "only one of this entry and the first has a segmentation: give all entries one, or none"
    return wrong_segmentation(entry["segmentation"], images[entry["image_id"]]) if masked else None


def _is_finite(number: Any) -> bool:
    """Whether it is a number that is finite, also as a float."""
    return type(number) in (int, float) and abs(number) <= sys.float_info.max


def _is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(map(_is_finite, box)) and min(box[2:]) >= 0


# Scores


def _images(
    ground_truth: Mapping[str, Any], detections: Sequence[Detection], image_ids: Iterable[int] | None
) -> dict[int, Any]:
    """The images to score, by their ids."""
    images = {image["id"]: image for image in ground_truth["images"]}
    chosen = list(images) if image_ids is None else list(image_ids)
    if unknown := {*chosen, *(detection["image_id"] for detection in detections)} - images.keys():
        raise SettingsError(f"image_id {min(unknown)} is not an image of the ground truth.")
    return {number: images[number] for number in chosen}


def _all_have_masks(detections: Sequence[Detection]) -> bool:
    masks = sum("segmentation" in detection for detection in detections)
    if 0 < masks < len(detections):
        raise SettingsError(
            f"{masks:,} of {len(detections):,} detections have a segmentation: give all of them one, or none."
        )
    return masks == len(detections)


@dataclass(frozen=True)
class CocoInputs:
    """What COCOeval takes: the images to score, by their ids, their objects and what was found in them."""

    images: Mapping[int, Any]
    names: Mapping[int, str]
    """The names of the categories, by their ids."""
    truth: Sequence[Mapping[str, Any]]
    found: Sequence[Detection]
    kinds: tuple[str, ...]
    """Boxes, and masks if there are any."""

    def annotations(self, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The contents of COCO files with the objects and with what was found."""
        data = {
            "images": [dict(image) for image in self.images.values()],
            "categories": [{"id": category} for category in self.names],
        }
        found = _numbered(_result(kind, one) for one in self.found)
        return {**data, "annotations": _numbered(self.truth)}, {**data, "annotations": found}


def coco_inputs(
    ground_truth: Mapping[str, Any], detections: Sequence[Detection], image_ids: Iterable[int] | None
) -> CocoInputs:
    """The detections and objects on all images or on `image_ids`; see `coco_evaluation`."""
    images = _images(ground_truth, detections, image_ids)
    truth = [annotation for annotation in ground_truth["annotations"] if annotation["image_id"] in images]
    for annotation in truth:
        # COCOeval_faster would count it as a small object, of area 0.
        if "area" not in annotation:
            raise SettingsError(f"annotation {annotation.get('id')} of the ground truth has no area.")
    masks = all(annotation.get("segmentation") for annotation in truth) and _all_have_masks(detections)
    return CocoInputs(
        images,
        {category["id"]: category["name"] for category in ground_truth["categories"]},
        truth,
        [detection for detection in detections if detection["image_id"] in images],
        ("box", "mask") if masks else ("box",),
    )


def _precision(kind: str, inputs: CocoInputs) -> np.ndarray[Any, Any]:
    """COCOeval's precision at (IoU threshold, recall, category, range of areas, most detections)."""
    from faster_coco_eval import COCO, COCOeval_faster  # takes half a second to import

    truth, found = map(COCO, inputs.annotations(kind))
    evaluation = COCOeval_faster(truth, found, {"box": "bbox", "mask": "segm"}[kind])
    evaluation.evaluate()
    evaluation.accumulate()
    return np.asarray(evaluation.eval["precision"])


def _numbered(annotations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies, which COCOeval may modify, with ids from 1: it never finds an object with the id 0."""
    return [{**annotation, "id": number} for number, annotation in enumerate(annotations, 1)]


def _result(kind: str, detection: Detection) -> Detection:
    """A detection as loadRes has it for COCOeval."""
    entry = {key: detection[key] for key in ("image_id", "category_id", "score")} | {"iscrowd": 0}
    if kind == "box" and "bbox" in detection:
        box = detection["bbox"]
        return {**entry, "bbox": box, "area": box[2] * box[3]}
    # Without a box, the mask's bounding box; and masks without a box, from which loadRes would take the area.
    rle = detection["segmentation"]
    shape = {"bbox": coco_mask.toBbox(rle).tolist()} if kind == "box" else {"segmentation": rle}
    return {**entry, **shape, "area": int(coco_mask.area(rle))}


def _percent(name: str, precision: np.ndarray[Any, Any]) -> dict[str, float]:
    """The mean over what there is to find, if anything."""
    found = precision[precision > -1]
    return {name: 100 * float(found.mean())} if found.size else {}
