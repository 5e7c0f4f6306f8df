"""A small data set in COCO's format, for the tests of reading it and of its mistakes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from polynl.data.images import Unreadable
from polynl.tasks.coco.annotations import read_annotations
from polynl.tasks.coco.data import CocoImages, contiguous_labels

Content = dict[str, Any]
WIDTH, HEIGHT = 12, 10
SQUARE = [[2, 1, 6, 1, 6, 4, 2, 4]]


def instance(number: int, image: int, **changes: Any) -> Content:
    """A square of 4 × 3 pixels."""
    entry = {"id": number, "image_id": image, "category_id": 3, "bbox": [2, 1, 4, 3], "segmentation": SQUARE}
    return copy.deepcopy(entry | {"area": 12.0, "iscrowd": 0} | changes)


def runs(mask: Any, *, compressed: bool) -> Content:
    """pycocotools' RLE of a mask, or what its documentation says of uncompressed ones."""
    if compressed:
        encoded = coco_mask.encode(np.asfortranarray(mask))
        return {"size": encoded["size"], "counts": encoded["counts"].decode()}
    flat = [0, *mask.flatten(order="F").tolist()]
    edges = [place for place in range(1, len(flat)) if flat[place] != flat[place - 1]]
    return {"size": list(mask.shape), "counts": np.diff([1, *edges, len(flat)]).tolist()}


def noise(seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 2, (HEIGHT, WIDTH), dtype=np.uint8)


def small() -> Content:
    """Three images, the first below a folder; objects as polygons and as both kinds of RLE."""
    images = [{"id": 7, "file_name": "below/a.png"}, {"id": 2, "file_name": "b.png"}]
    images.append({"id": 30, "file_name": "c.png"})
    crowd = {"iscrowd": 1, "segmentation": runs(noise(), compressed=False)}
    return {
        "info": {"description": "small"},
        "images": [image | {"width": WIDTH, "height": HEIGHT} for image in images],
        "annotations": [
            instance(11, 7),
            instance(12, 2, category_id=90, segmentation=runs(noise(1), compressed=True)),
            instance(13, 7, **crowd),
            instance(14, 30, bbox=[8, 8, 9, 9], segmentation=[*SQUARE, [8, 8, 17, 8, 17, 17]]),
        ],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}],
    }


def written(root: Path, content: Content) -> Path:
    """The annotations as a file, the images beside it."""
    for number, image in enumerate(small()["images"]):
        path = root / "images" / image["file_name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    file = root / "instances_small.json"
    file.write_text(json.dumps(content))
    return file


def read(root: Path, content: Content) -> Any:
    return read_annotations(written(root, content), root / "images")


def dataset(root: Path, content: Content, *, training: bool = True, **options: Any) -> CocoImages:
    annotations = read(root, content)
    options = {"labels": contiguous_labels(annotations.categories), "on_bad_image": "stop", **options}
    return CocoImages(annotations, root / "images", training=training, **options)


def sample(data: CocoImages, index: int) -> tuple[torch.Tensor, dict[str, Any]]:
    found = data[index]
    assert not isinstance(found, Unreadable)
    return found
