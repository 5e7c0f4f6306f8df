"""Entries of COCO's files: check their fields and masks, and convert masks to RLE."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pycocotools import mask as coco_mask

from polynl.data.annotation_files import FURTHEST, are_coordinates, shown

Entry = dict[str, Any]
Checks = Mapping[str, tuple[Callable[[Any], bool], str]]
"""For each key of an entry, whether a value is right, and what is expected."""


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
        expected = "expected a list of polygons, or an object with size and counts"
        return f"its segmentation is {shown(segmentation)}: {expected}"
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
