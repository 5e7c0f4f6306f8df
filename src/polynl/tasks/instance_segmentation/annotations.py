"""Annotations in COCO's format, fully checked before use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycocotools import mask as coco_mask

from polynl.data.annotation_files import FURTHEST, are_coordinates, check_there, leaves, shown
from polynl.errors import SettingsError, near_matches
from polynl.files import read_json
from polynl.tasks.instance_segmentation.masks import (
    Checks,
    Entry,
    encoded,
    wrong_field,
    wrong_segmentation,
)

_LISTS = ("images", "annotations", "categories")
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
    "segmentation": (lambda _: True, "a list of polygons, or an object with size and counts"),
}


@dataclass(frozen=True)
class Annotations:
    """The checked content of an annotation file."""

    path: Path
    content: dict[str, Any]
    """Its images, annotations and categories; every annotation has `area` and `iscrowd`."""
    categories: dict[int, str]
    """Names by id, in order of ids."""


def read_annotations(path: Path, folder: Path) -> Annotations:
    """The annotations of the images in `folder`; a SettingsError names the first wrong entry."""
    content = _loaded(path)
    checks: Checks = {"name": (lambda name: isinstance(name, str), "a text")}
    categories = _by_id(path, "categories", content["categories"], checks)
    images = _by_id(path, "images", content["images"], _IMAGE)
    checks = {
        "image_id": (lambda number: _is_int(number) and number in images, "the id of an image"),
        "category_id": (lambda number: _is_int(number) and number in categories, "the id of a category"),
        **_ANNOTATION,
    }
    annotations = _by_id(path, "annotations", content["annotations"], checks, images)
    check_there((image["file_name"] for image in content["images"]), folder, annotations=path)
    for entry in annotations.values():
        entry.setdefault("iscrowd", 0)
        if "area" not in entry:
            mask = encoded(entry["segmentation"], images[entry["image_id"]])
            entry["area"] = float(coco_mask.area(mask))
    if 0 in annotations:
        # COCOeval stores the id of the object that a detection matches, and 0 if there is none.
        annotations[0]["id"] = max(annotations) + 1
    return Annotations(path, content, {number: categories[number]["name"] for number in sorted(categories)})


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
    return Annotations(annotations.path, content, kept)


# What can be wrong with a file


def _loaded(path: Path) -> dict[str, list[Entry]]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise SettingsError(f"{path} contains {shown(content)}: expected an object with {_LISTS}.")
    for name in _LISTS:
        if not isinstance(content.get(name), list):
            found = f"{name!r} as {shown(content[name])}" if name in content else f"no {name!r}"
            raise SettingsError(f"{path} has {found}: expected lists of {', '.join(_LISTS)}.")
    return {name: content[name] for name in _LISTS}


def _by_id(
    path: Path, name: str, entries: list[Any], checks: Checks, images: dict[int, Entry] | None = None
) -> dict[int, Entry]:
    """The entries of a list by id, all of them checked; with `images`, they are annotations of these."""
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
