"""COCO's masks, polygons or run lengths: check them and convert them to RLE."""

from __future__ import annotations

from typing import Any

from pycocotools import mask as coco_mask

from polynl.data.annotation_files import FURTHEST, are_coordinates, shown


def wrong_segmentation(segmentation: Any, height: int, width: int) -> str | None:
    """What is wrong with the mask of an image, or None."""
    if isinstance(segmentation, dict):
        return _wrong_runs(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        expected = "expected a list of polygons, or an object with size and counts"
        return f"its segmentation is {shown(segmentation)}: {expected}"
    for place, polygon in enumerate(segmentation):
        expected = f"expected 6 coordinates, 8, 10, …, finite and below {FURTHEST:,.0f}"
        # pycocotools takes four numbers for a box.
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            size = f" (of length {len(polygon)})" if isinstance(polygon, list) else ""
            return f"segmentation[{place}] is {shown(polygon)}{size}: {expected}"
        if not are_coordinates(polygon):
            number = next(place for place, value in enumerate(polygon) if not are_coordinates([value]))
            return f"segmentation[{place}][{number}] is {shown(polygon[number])}: {expected}"
    return None


def encoded(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Correct polygons or run lengths as pycocotools' compressed RLE."""
    if isinstance(segmentation, list):
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coco_mask.frPyObjects(segmentation, height, width)
    return segmentation


def _wrong_runs(rle: dict[str, Any], height: int, width: int) -> str | None:
    size, counts = rle.get("size"), rle.get("counts")
    if size != [height, width] or set(map(type, size)) != {int}:
        return f"the size in its segmentation is {shown(size)}: expected its image's, [{height}, {width}]"
    runs = _run_lengths(counts, height, width)
    if runs is None:
        return f"the counts in its segmentation are {shown(counts)}: expected run lengths, as list or text"
    # COCOeval never ends on a sum that is too small.
    if sum(runs) != height * width or min(runs) < 0:
        return (
            f"the counts in its segmentation are {shown(counts)}, which sum to {sum(runs)}: expected "
            f"numbers from 0 on that sum to {height} * {width} = {height * width}"
        )
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
