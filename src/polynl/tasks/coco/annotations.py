"""Annotations in COCO's format, fully checked before use: fields, ids, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycocotools import mask as coco_mask

from polynl.data.annotation_files import FURTHEST, are_coordinates, check_there, leaves
from polynl.errors import SettingsError, near_matches, shown
from polynl.files import read_json

Entry = dict[str, Any]
Check = tuple[Callable[[Any], bool], str]
"""Whether the value of a key is right, and what is expected."""
Checks = Mapping[str, Check]

_LISTS = ("images", "annotations", "categories")
_LIST = (lambda value: isinstance(value, list)), "a list"
_SIDE = (lambda side: _is_int(side) and side > 0), "a whole number above 0"
_IMAGE: Checks = {
    "file_name": (
        lambda name: isinstance(name, str) and name != "" and not leaves(name),
        "a path that is relative to the folder and stays in it",
    ),
    "width": _SIDE,
    "height": _SIDE,
}
_ANNOTATION: Checks = {
    "bbox": (
        lambda box: isinstance(box, list) and len(box) == 4 and are_coordinates(box),
        f"left, top, width, height, finite and below {FURTHEST:,.0f}",
    ),
    "iscrowd": (lambda crowd: crowd in (0, 1), "0 or 1"),
    "area": (
        lambda area: type(area) in (int, float) and 0 <= area < math.inf,
        "a finite number from 0 on",
    ),
}
_SEGMENTATION = "a list of polygons, or an object with size and counts"
# The recipes for boxes say what to do; empty lists are how programs without masks write none.
_MASK: Checks = {
    "segmentation": (
        lambda shape: shape not in (None, []),
        f"{_SEGMENTATION}; without masks, train a recipe for boxes, such as coco_boxes",
    )
}


@dataclass(frozen=True)
class Annotations:
    """The checked content of an annotation file."""

    path: Path
    content: dict[str, Any]
    """Its images, annotations and categories; every annotation has `area` and `iscrowd`.

    Annotations read without masks have no `segmentation`.
    """
    categories: dict[int, str]
    """Names by id, in order of ids."""
    left_out: frozenset[int] = frozenset()
    """Categories of the file that are neither learned nor scored."""


def read_annotations(path: Path, folder: Path, *, masks: bool = True) -> Annotations:
    """The annotations of the images in `folder`; a SettingsError names the first wrong entry.

    Without `masks`, only boxes are read: the file need not have segmentations.
    """
    content = read_json(path)
    if wrong := wrong_field(content, dict.fromkeys(_LISTS, _LIST)):
        raise SettingsError(f"{path}: {wrong}.")
    content = {name: content[name] for name in _LISTS}
    checks: Checks = {"name": (lambda name: isinstance(name, str), "a text")}
    categories = _by_id(path, "categories", content["categories"], checks)
    images = _by_id(path, "images", content["images"], _IMAGE)
    checks = {
        "image_id": one_of(images, "images' ids"),
        "category_id": one_of(categories, "categories' ids"),
        **_ANNOTATION,
        **(_MASK if masks else {}),
    }
    annotations = _by_id(
        path, "annotations", content["annotations"], checks, images=images if masks else None
    )
    check_there((image["file_name"] for image in content["images"]), folder, annotations=path)
    for entry in annotations.values():
        entry.setdefault("iscrowd", 0)
        if not masks:
            entry.pop("segmentation", None)
        if "area" not in entry:
            entry["area"] = _area(entry, images[entry["image_id"]])
    if 0 in annotations:
        # COCOeval stores the id of the object that a detection matches, and 0 if there is none.
        annotations[0]["id"] = max(annotations) + 1
    return Annotations(path, content, {number: categories[number]["name"] for number in sorted(categories)})


def _area(entry: Entry, image: Entry) -> float:
    """The area of the mask, or of the box if there is none."""
    if "segmentation" in entry:
        return float(coco_mask.area(encoded(entry["segmentation"], image)))
    _, _, width, height = entry["bbox"]
    return float(max(width, 0) * max(height, 0))


def only(annotations: Annotations, names: Sequence[str]) -> Annotations:
    """All images, with the objects of some categories only."""
    known = annotations.categories
    for name in names:
        if name not in known.values():
            hint = near_matches(name, known.values())
            raise SettingsError(f"{annotations.path} has no category {name!r}.{hint}")
    kept = {number: name for number, name in known.items() if name in names}
    content = {
        "images": annotations.content["images"],
        "annotations": [one for one in annotations.content["annotations"] if one["category_id"] in kept],
        "categories": [one for one in annotations.content["categories"] if one["id"] in kept],
    }
    return Annotations(annotations.path, content, kept, frozenset(known.keys() - kept.keys()))


# What can be wrong with a file


def _by_id(
    path: Path, name: str, entries: list[Any], checks: Checks, images: dict[int, Entry] | None = None
) -> dict[int, Entry]:
    """The entries of a list by id, all of them checked; with `images`, they are masks on these."""
    checks = {"id": (_is_int, "a whole number"), **checks}
    known: dict[int, Entry] = {}
    for place, entry in enumerate(entries):
        mistake = wrong_field(entry, checks, optional=("area", "iscrowd"))
        if mistake is None and entry["id"] in known:
            mistake = f"{name}[{list(known).index(entry['id'])}] has the same id"
        if mistake is None and images is not None:
            mistake = wrong_segmentation(entry["segmentation"], images[entry["image_id"]])
        if mistake is not None:
            number = f" (id {shown(entry['id'])})" if isinstance(entry, dict) and "id" in entry else ""
            raise SettingsError(f"{path}: {name}[{place}]{number}: {mistake}.")
        known[entry["id"]] = entry
    return known


def _is_int(value: Any) -> bool:
    return type(value) is int


def one_of(known: Container[int], kind: str, types: Collection[type] = (int,)) -> Check:
    """The check of an id of one of the `kind` of things."""
    return lambda number: type(number) in types and number in known, f"one of the {kind}"


def wrong_field(entry: Any, checks: Checks, *, optional: Collection[str] = ()) -> str | None:
    """The first field of an entry that is missing or wrong, or None."""
    if not isinstance(entry, dict):
        return f"it is {shown(entry)}: expected an object with {', '.join(checks)}"
    for key, (is_right, expected) in checks.items():
        if key not in entry and key not in optional:
            return f"it has no {key}: expected {expected}"
        if key in entry and not is_right(entry[key]):
            return f"its {key} is {shown(entry[key])}: expected {expected}"
    return None


def wrong_segmentation(segmentation: Any, image: Entry) -> str | None:
    """What is wrong with a mask in an image, or None."""
    if isinstance(segmentation, dict):
        return _wrong_runs(segmentation, image["height"], image["width"])
    if not isinstance(segmentation, list) or not segmentation:
        return f"its segmentation is {shown(segmentation)}: expected {_SEGMENTATION}"
    for place, polygon in enumerate(segmentation):
        # pycocotools takes four numbers for a box.
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            size = f" (of length {len(polygon)})" if isinstance(polygon, list) else ""
            found = f"segmentation[{place}] is {shown(polygon)}{size}"
        elif not are_coordinates(polygon):
            number = next(place for place, value in enumerate(polygon) if not are_coordinates([value]))
            found = f"segmentation[{place}][{number}] is {shown(polygon[number])}"
        else:
            continue
        return f"{found}: expected 6 coordinates, 8, 10, …, finite and below {FURTHEST:,.0f}"
    return None


def encoded(segmentation: Any, image: Entry) -> dict[str, Any]:
    """Correct polygons or run lengths as pycocotools' compressed RLE."""
    if isinstance(segmentation, dict) and not isinstance(segmentation["counts"], list):
        return segmentation
    found = coco_mask.frPyObjects(segmentation, image["height"], image["width"])
    return coco_mask.merge(found) if isinstance(segmentation, list) else found


def _wrong_runs(rle: dict[str, Any], height: int, width: int) -> str | None:
    size, counts = rle.get("size"), rle.get("counts")
    if size != [height, width] or set(map(type, size)) != {int}:
        return f"the size in its segmentation is {shown(size)}: expected its image's, [{height}, {width}]"
    found = f"the counts in its segmentation are {shown(counts)}"
    runs = _run_lengths(counts, height, width)
    if runs is None:
        return f"{found}: expected run lengths, as list or text"
    # COCOeval never ends on a sum that is too small.
    if sum(runs) != height * width or min(runs) < 0:
        expected = f"numbers from 0 on that sum to {height} * {width} = {height * width}"
        return f"{found}, which sum to {sum(runs)}: expected {expected}"
    return None


def _run_lengths(counts: Any, height: int, width: int) -> list[int] | None:
    """The run lengths in counts, a list or COCO's text; None if they are neither."""
    if isinstance(counts, list):
        return counts if set(map(type, counts)) <= {int} else None
    if not isinstance(counts, str) or not counts:
        return None
    from faster_coco_eval.mask_api_new_cpp import toUncompressedRLE  # a tenth of pycocotools' time

    try:
        return toUncompressedRLE([{"size": [height, width], "counts": counts}])[0]["counts"]
    except (ValueError, RuntimeError):
        return None
