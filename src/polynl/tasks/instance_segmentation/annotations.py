"""Annotations in COCO's format, fully checked before use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pycocotools import mask as coco_mask

from polynl.data.annotation_files import FURTHEST, are_coordinates, check_there, leaves, shown
from polynl.errors import SettingsError, near_matches
from polynl.files import read_json
from polynl.tasks.instance_segmentation.masks import encoded, wrong_segmentation

Entry = dict[str, Any]
_LISTS = ("images", "annotations", "categories")


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
    categories = _by_id(path, "categories", content["categories"], _wrong_category)
    images = _by_id(path, "images", content["images"], _wrong_image)
    wrong = partial(_wrong_annotation, images=images, categories=categories)
    annotations = _by_id(path, "annotations", content["annotations"], wrong)
    check_there((image["file_name"] for image in content["images"]), folder, annotations=path)
    for entry in annotations.values():
        entry.setdefault("iscrowd", 0)
        if "area" not in entry:
            entry["area"] = float(coco_mask.area(mask_of(entry, images[entry["image_id"]])))
    if 0 in annotations:
        # COCOeval stores the id of the object that a detection matches, and 0 if there is none.
        annotations[0]["id"] = max(annotations) + 1
    return Annotations(path, content, {number: categories[number]["name"] for number in sorted(categories)})


def mask_of(entry: Entry, image: Entry) -> dict[str, Any]:
    """The mask of an annotation, as pycocotools' RLE."""
    return encoded(entry["segmentation"], image["height"], image["width"])


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
    path: Path, name: str, entries: list[Any], wrong: Callable[[Entry], str | None]
) -> dict[int, Entry]:
    """The entries of a list by id, all of them checked."""
    known: dict[int, Entry] = {}
    for place, entry in enumerate(entries):
        mistake = _wrong_id(name, entry, known) or wrong(entry)
        if mistake:
            number = f" (id {shown(entry['id'])})" if isinstance(entry, dict) and "id" in entry else ""
            raise SettingsError(f"{path}: {name}[{place}]{number}: {mistake}.")
        known[entry["id"]] = entry
    return known


def _wrong_id(name: str, entry: Any, known: dict[int, Entry]) -> str | None:
    if not isinstance(entry, dict):
        return f"it is {shown(entry)}: expected an object"
    if type(entry.get("id")) is not int:
        return _unexpected(entry, "id", "a whole number")
    if entry["id"] in known:
        return f"{name}[{list(known).index(entry['id'])}] has the same id"
    return None


def _wrong_category(entry: Entry) -> str | None:
    return None if isinstance(entry.get("name"), str) else _unexpected(entry, "name", "a text")


def _wrong_image(entry: Entry) -> str | None:
    name = entry.get("file_name")
    if not isinstance(name, str) or not name:
        return _unexpected(entry, "file_name", "a text")
    if leaves(name):
        return _unexpected(entry, "file_name", "a path that is relative to the folder and stays in it")
    for side in ("width", "height"):
        if type(entry.get(side)) is not int or entry[side] <= 0:
            return _unexpected(entry, side, "a whole number above 0")
    return None


def _wrong_annotation(entry: Entry, *, images: dict[int, Entry], categories: dict[int, Entry]) -> str | None:
    for key, kind, known in (("image_id", "images", images), ("category_id", "categories", categories)):
        if type(entry.get(key)) is not int or entry[key] not in known:
            return _unexpected(entry, key, f"an id that one of the {kind} has")
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not are_coordinates(box):
        return _unexpected(entry, "bbox", f"left, top, width, height, finite and below {FURTHEST:,.0f}")
    if entry.get("iscrowd", 0) not in (0, 1):
        return _unexpected(entry, "iscrowd", "0 or 1")
    area = entry.get("area", 0)
    if type(area) not in (int, float) or not 0 <= area < math.inf:
        return _unexpected(entry, "area", "a finite number from 0 on")
    if "segmentation" not in entry:
        return _unexpected(entry, "segmentation", "a list of polygons, or an object with size and counts")
    image = images[entry["image_id"]]
    return wrong_segmentation(entry["segmentation"], image["height"], image["width"])


def _unexpected(entry: Entry, key: str, expected: str) -> str:
    found = f"its {key} is {shown(entry[key])}" if key in entry else f"it has no {key}"
    return f"{found}: expected {expected}"
