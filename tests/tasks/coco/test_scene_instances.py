"""Scenes for instance segmentation are what `polynl data scenes` writes, without the files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pycocotools import mask as coco_mask
from rich.console import Console

from polynl.data.config import SceneFiles
from polynl.data.images import Unreadable
from polynl.data.scenes import CATEGORIES, CHUNK, DIFFICULTIES
from polynl.data.scenes_export import export_scenes
from polynl.tasks.coco.annotations import read_annotations
from polynl.tasks.coco.data import CocoImages, SceneInstances, labels_by_id

# pycocotools has not followed NumPy 2 here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)
FILES = SceneFiles(images=CHUNK + 20, val_images=12, size=24, difficulty="hard", seed=3)
COUNTS = {"train": FILES.images, "val": FILES.val_images}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes")
    export_scenes(FILES, out, Console(quiet=True))
    return out


def scenes(split: str, *, training: bool, flip: float = 0.5, count: int | None = None) -> SceneInstances:
    options: dict[str, Any] = {"size": FILES.size, "difficulty": FILES.difficulty, "seed": FILES.seed}
    return SceneInstances(count or COUNTS[split], split=split, training=training, flip=flip, **options)


def images(root: Path, split: str, *, training: bool, flip: float = 0.5) -> CocoImages:
    annotations = read_annotations(root / "annotations" / f"instances_{split}.json", root / split)
    labels = labels_by_id(annotations.categories)
    return CocoImages(
        annotations, root / split, labels=labels, training=training, flip=flip, on_bad_image="stop"
    )


@pytest.mark.parametrize("split", COUNTS)
@pytest.mark.parametrize("training", [True, False])
def test_scenes_are_the_same_from_files_and_without(exported: Path, split: str, training: bool) -> None:
    """Mirrored ones among them: both draw alike."""
    read, drawn = images(exported, split, training=training), scenes(split, training=training)
    assert len(read) == len(drawn) == COUNTS[split]
    assert read.aspect_ratios == drawn.aspect_ratios
    for index in range(len(drawn)):
        torch.manual_seed(index)
        sample = read[index]
        torch.manual_seed(index)
        image, target = drawn[index]
        assert not isinstance(sample, Unreadable)
        assert torch.equal(image, sample[0])
        assert target.keys() == sample[1].keys()
        assert target["image_id"] == sample[1]["image_id"] == index
        for key in target.keys() - {"image_id"}:
            assert type(target[key]) is torch.Tensor
            assert target[key].dtype == sample[1][key].dtype, key
            assert torch.equal(target[key], sample[1][key]), key


@pytest.mark.parametrize("split", COUNTS)
def test_the_ground_truth_is_that_of_the_files(exported: Path, split: str) -> None:
    content = json.loads((exported / "annotations" / f"instances_{split}.json").read_text())
    del content["info"]
    drawn = scenes(split, training=False)
    assert drawn.ground_truth == content
    assert images(exported, split, training=False).ground_truth == content
    assert drawn.categories == {entry["id"]: entry["name"] for entry in content["categories"]}


def test_targets_agree_with_the_ground_truth() -> None:
    data = scenes("val", training=True, flip=0.0)
    for index in range(len(data)):
        _, target = data[index]
        entries = [entry for entry in data.ground_truth["annotations"] if entry["image_id"] == index]
        assert [entry["category_id"] for entry in entries] == target["labels"].tolist()
        wanted = DIFFICULTIES[FILES.difficulty]
        assert len(entries) == wanted.figures + wanted.distractors + 1
        assert data.categories[entries[-1]["category_id"]] == CATEGORIES[-1] == "cue"
        for entry, mask, box in zip(entries, target["masks"], target["boxes"].tolist(), strict=True):
            encoded = coco_mask.frPyObjects(entry["segmentation"], FILES.size, FILES.size)
            assert torch.equal(torch.from_numpy(coco_mask.decode(encoded)), mask)
            left, top, width, height = coco_mask.toBbox(encoded).tolist()
            assert box == [left, top, left + width, top + height]
            assert entry["area"] == mask.sum()


def test_mirrored_scenes() -> None:
    straight, mirrored = (scenes("val", training=True, flip=flip) for flip in (0.0, 1.0))
    image, target = straight[1]
    other, changed = mirrored[1]
    assert torch.equal(other, image.flip(2))
    assert torch.equal(changed["masks"], target["masks"].flip(2))
    assert torch.equal(changed["boxes"][:, [2, 0]], FILES.size - target["boxes"][:, [0, 2]])
    assert torch.equal(straight[1][0], image), "mirroring leaves the scenes themselves alone"


def test_scoring_is_never_mirrored() -> None:
    data, plain = scenes("val", training=False, flip=1.0), scenes("val", training=True, flip=0.0)
    assert torch.equal(data[0][0], plain[0][0])
    assert data[-1][1] == {"image_id": 11}
    with pytest.raises(IndexError):
        data[12]


def test_masks_are_not_kept() -> None:
    data = scenes("train", training=True)
    before = len(pickle.dumps(data))
    for index in range(len(data)):
        data[index]
    assert len(pickle.dumps(data)) == before


@pytest.mark.parametrize("size", [16, 17])
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_the_smallest_scenes_have_objects_to_train_on(size: int, difficulty: str) -> None:
    data = SceneInstances(60, size=size, difficulty=difficulty, split="train", seed=0, training=True)
    for index in range(len(data)):
        boxes = data[index][1]["boxes"]
        assert (boxes[:, 2:] - boxes[:, :2]).amin(1).max() > 1
