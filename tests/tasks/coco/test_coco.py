"""Images in COCO's format: read as pycocotools and torchvision's reference read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from small_coco import (
    HEIGHT,
    WIDTH,
    dataset,
    instance,
    noise,
    read,
    runs,
    sample,
    small,
    written,
)

from polynl.data.images import Unreadable, UnreadableImageError, read_image
from polynl.errors import SettingsError
from polynl.tasks.coco.annotations import read_annotations
from polynl.tasks.coco.data import CocoImages, aspect_groups, contiguous_labels, labels_by_id

# pycocotools has not followed NumPy 2 here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)
DATA = os.environ.get("POLYNL_DATA")


def reference_target(coco: COCO, image: int, labels: dict[int, int]) -> dict[str, Any]:
    """What references/detection/coco_utils.py of torchvision does, step by step."""
    entries = [entry for entry in coco.imgToAnns[image] if entry["iscrowd"] == 0]
    height, width = coco.imgs[image]["height"], coco.imgs[image]["width"]
    boxes = torch.as_tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
    boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    boxes = boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    found = torch.tensor([labels[entry["category_id"]] for entry in entries], dtype=torch.int64)
    empty = np.zeros((0, height, width), dtype=np.uint8)
    masks = torch.from_numpy(np.concatenate([empty, *(coco.annToMask(entry)[None] for entry in entries)]))
    kept = (boxes[:, 3] > boxes[:, 1]) & (boxes[:, 2] > boxes[:, 0])
    return {"boxes": boxes[kept], "labels": found[kept], "masks": masks[kept]}


def assert_as_reference(data: CocoImages, coco: COCO, labels: dict[int, int], every: int = 1) -> None:
    for index in range(0, len(data), every):
        _, target = sample(data, index)
        expected = reference_target(coco, target["image_id"], labels)
        assert set(target) == {"image_id", *expected}
        for key, value in expected.items():
            assert type(target[key]) is torch.Tensor
            assert target[key].dtype == value.dtype, key
            assert torch.equal(target[key], value), (key, target["image_id"])


# What is read


def test_targets_are_those_of_pycocotools_and_the_reference(tmp_path: Path) -> None:
    data = dataset(tmp_path, small(), flip=0.0)
    assert_as_reference(data, COCO(str(tmp_path / "instances_small.json")), {3: 1, 90: 2})
    images = [sample(data, index) for index in range(3)]
    assert [target["image_id"] for _, target in images] == [2, 7, 30], "in order of ids, as the reference"
    for (image, _), name in zip(images, ("b.png", "below/a.png", "c.png"), strict=True):
        assert type(image) is torch.Tensor
        assert torch.equal(image, read_image(tmp_path / "images" / name))


def test_a_target_by_hand(tmp_path: Path) -> None:
    data = dataset(tmp_path, small(), flip=0.0)
    _, target = sample(data, 1)
    assert target["boxes"].tolist() == [[2, 1, 6, 4]], "the crowd is not among them"
    expected = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.uint8)
    expected[:, 1:4, 2:6] = 1
    assert torch.equal(target["masks"], expected)
    _, target = sample(data, 0)
    assert torch.equal(target["masks"][0], torch.from_numpy(noise(1)))
    assert target["labels"].tolist() == [2]
    _, target = sample(data, 2)
    assert target["boxes"].tolist() == [[8, 8, WIDTH, HEIGHT]], "clipped"
    assert target["masks"][0, 2, 3] == target["masks"][0, 8, 11] == 1, "two polygons are one object"


def test_boxes_of_no_extent_are_dropped_and_images_without_others_left_out(tmp_path: Path) -> None:
    content = small()
    content["annotations"] = [
        instance(1, 7, bbox=[2, 1, 4, 0]),
        instance(2, 7, bbox=[20, 1, 4, 3]),
        instance(3, 7, bbox=[2, 1, 1.5, 3], category_id=90),
        instance(4, 2, bbox=[2, 1, 4, 1]),
    ]
    data = dataset(tmp_path, content, flip=0.0)
    assert len(data) == 1, "image 2 has a side of 1 only, image 30 nothing"
    _, target = sample(data, 0)
    assert target["boxes"].tolist() == [[2, 1, 3.5, 4]]
    assert target["labels"].tolist() == [2]
    assert target["masks"].shape == (1, HEIGHT, WIDTH)
    assert_as_reference(data, COCO(str(tmp_path / "instances_small.json")), {3: 1, 90: 2})


def test_an_image_of_crowds_only_is_trained_on_as_the_reference_does(tmp_path: Path) -> None:
    content = small()
    content["annotations"] = [content["annotations"][2]]
    data = dataset(tmp_path, content)
    assert len(data) == 1
    _, target = sample(data, 0)
    shapes = [tuple(target[key].shape) for key in ("boxes", "labels", "masks")]
    assert shapes == [(0, 4), (0,), (0, HEIGHT, WIDTH)]
    assert (target["boxes"].dtype, target["labels"].dtype) == (torch.float32, torch.int64)


def test_scoring_keeps_every_image_and_gives_ids_only(tmp_path: Path) -> None:
    content = small()
    content["annotations"] = content["annotations"][:1]
    torch.manual_seed(0)
    data = dataset(tmp_path, content, training=False, flip=1.0)
    samples = [sample(data, index) for index in range(len(data))]
    assert [target for _, target in samples] == [{"image_id": 2}, {"image_id": 7}, {"image_id": 30}]
    assert torch.equal(samples[1][0], read_image(tmp_path / "images" / "below" / "a.png")), "not mirrored"
    assert data.ground_truth == {key: content[key] for key in ("images", "annotations", "categories")}


def test_what_scoring_needs_is_filled_in(tmp_path: Path) -> None:
    content = small()
    for entry in content["annotations"]:
        del entry["area"]
    del content["annotations"][0]["iscrowd"]
    content["annotations"][1]["id"] = 0
    filled = read(tmp_path, content).content["annotations"]
    coco = COCO(str(written(tmp_path, small())))
    assert [entry["area"] for entry in filled] == [
        coco.annToMask(entry).sum() for entry in coco.anns.values()
    ]
    assert filled[0]["area"] == 12
    assert filled[0]["iscrowd"] == 0
    assert [entry["id"] for entry in filled] == [11, 15, 13, 14], "0 is no id for COCOeval"


def test_categories_and_labels(tmp_path: Path) -> None:
    annotations = read(tmp_path, small())
    assert list(annotations.categories.items()) == [(3, "car"), (90, "toothbrush")]
    assert contiguous_labels(annotations.categories) == {3: 1, 90: 2}
    assert labels_by_id(annotations.categories) == {3: 3, 90: 90}
    assert labels_by_id({1000: "last", 1: "first"}) == {1: 1, 1000: 1000}
    for number in (0, -5, 1001):
        with pytest.raises(SettingsError, match=rf"'cat' has the id {number}:.*--data.category-ids renumber"):
            labels_by_id({1: "dog", number: "cat"})
    with pytest.raises(ValueError, match=r"\{3: 1\}: expected one for each category, also for \[90\]"):
        CocoImages(annotations, tmp_path, labels={3: 1}, training=True, on_bad_image="stop")


def test_aspect_groups_are_those_of_the_reference(tmp_path: Path) -> None:
    bins = (2 ** np.linspace(-1, 1, 7)).tolist()
    ratios = [0.1, 0.5, 1.0, 2.0, 5.0, *(edge * off for edge in bins for off in (0.999, 1.001))]
    assert aspect_groups(ratios) == np.searchsorted(bins, ratios, side="right").tolist()
    content = small()
    content["images"][1] |= {"width": 30}
    content["annotations"] = content["annotations"][:1]
    assert dataset(tmp_path, content, training=False).aspect_ratios == [30 / HEIGHT, 1.2, 1.2]
    assert dataset(tmp_path, content).aspect_ratios == [1.2], "of the images that are left"


def test_a_box_that_float32_would_lose_is_dropped(tmp_path: Path) -> None:
    content = small()
    content["annotations"].append(instance(99, 7, bbox=[0, 5, 1e-7, 3]))
    _, target = sample(dataset(tmp_path, content, flip=1.0), 1)
    assert len(target["boxes"]) == 1
    assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()


# Mirroring


def test_image_boxes_and_masks_are_mirrored_together(tmp_path: Path) -> None:
    straight, mirrored = (dataset(tmp_path, small(), flip=flip) for flip in (0.0, 1.0))
    for index in range(3):
        (image, target), (other, changed) = sample(straight, index), sample(mirrored, index)
        assert type(other) is type(changed["boxes"]) is type(changed["masks"]) is torch.Tensor
        assert torch.equal(other, image.flip(2))
        assert torch.equal(changed["masks"], target["masks"].flip(2))
        left, top, right, bottom = target["boxes"].unbind(1)
        assert torch.equal(changed["boxes"], torch.stack([WIDTH - right, top, WIDTH - left, bottom], 1))
        assert torch.equal(changed["labels"], target["labels"])
    _, target = sample(mirrored, 1)
    left, top, right, bottom = target["boxes"][0].int().tolist()
    assert target["masks"][0, top:bottom, left:right].all()


def test_mirroring_follows_torch_seeds(tmp_path: Path) -> None:
    data = dataset(tmp_path, small())

    def drawn(seed: int) -> list[bool]:
        torch.manual_seed(seed)
        return [sample(data, 1)[1]["boxes"][0, 0].item() == 2 for _ in range(40)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert 8 < sum(drawn(0)) < 32


# Images that are not as they should be


@pytest.mark.parametrize("kind", ["cut", "other size"])
@pytest.mark.parametrize("training", [True, False])
def test_a_bad_image_stops_or_is_stood_in_for(tmp_path: Path, kind: str, training: bool) -> None:
    stopping = dataset(tmp_path, small(), training=training)
    skipping = dataset(tmp_path, small(), training=training, on_bad_image="skip")
    path = tmp_path / "images" / "b.png"
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-30])
        expected = f"{path} is not a readable image: "
    else:
        Image.new("RGB", (HEIGHT, WIDTH)).save(path)
        file = tmp_path / "instances_small.json"
        expected = f"{path} is 10 wide and 12 high, and {file} says 12 wide and 10 high (image id 2)"
    with pytest.raises(UnreadableImageError) as caught:
        stopping[0]
    first, hint = str(caught.value).splitlines()
    assert first.startswith(expected)
    assert "--data.on-bad-image skip" in hint
    assert skipping[0] == Unreadable(str(path), first)


def test_nothing_to_train_on_is_told(tmp_path: Path) -> None:
    content = small() | {"annotations": []}
    with pytest.raises(
        SettingsError, match=r"instances_small\.json has no image with an object to train on\."
    ):
        dataset(tmp_path, content)
    assert len(dataset(tmp_path, content, training=False)) == 3
    with pytest.raises(SettingsError, match=r"instances_small\.json has no image\."):
        dataset(tmp_path, content | {"images": []}, training=False)


@pytest.mark.parametrize("compressed", [True, False])
def test_any_rle_is_read(tmp_path: Path, compressed: bool) -> None:
    masks = [noise(seed) for seed in range(20)]
    masks += [np.full_like(masks[0], value) for value in (0, 1)]
    masks += [np.repeat(mask[:, :1], WIDTH, axis=1) for mask in masks]
    content = small()
    content["annotations"] = [
        instance(number, 7, segmentation=runs(mask, compressed=compressed))
        for number, mask in enumerate(masks, 1)
    ]
    _, target = sample(dataset(tmp_path, content, flip=0.0), 0)
    assert torch.equal(target["masks"], torch.from_numpy(np.stack(masks)))


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with images of COCO")
@pytest.mark.parametrize("split", ["train", "val"])
def test_real_images_have_the_reference_s_targets(split: str) -> None:
    root = Path(str(DATA), "coco-446")
    file, folder = root / "annotations" / f"instances_{split}2017.json", root / f"{split}2017"
    annotations, coco = read_annotations(file, folder), COCO(str(file))
    assert len(annotations.categories) == 80
    assert annotations.content == {key: coco.dataset[key] for key in ("images", "annotations", "categories")}
    labels = labels_by_id(annotations.categories)
    data = CocoImages(annotations, folder, labels=labels, training=True, flip=0.0, on_bad_image="stop")
    kept = [image for image in sorted(coco.imgs) if coco.imgToAnns[image]]
    assert len(data) == len(kept), "none has boxes of no extent only"
    assert_as_reference(data, coco, labels, every=5)
    data = CocoImages(annotations, folder, labels=labels, training=False, on_bad_image="stop")
    assert len(data) == len(coco.imgs)
