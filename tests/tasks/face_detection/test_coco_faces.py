"""Faces in COCO's format: own images without WIDER FACE's layout train and score."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from polynl.errors import SettingsError
from polynl.tasks.face_detection.config import FaceDetectionConfig
from polynl.tasks.face_detection.task import FaceDetection
from polynl.train.evaluation import evaluate_checkpoint, evaluate_detections
from polynl.train.loop import train
from polynl.train.recipe_file import load_recipe

TINY = Path(__file__).parents[2] / "tiny_faces.yaml"
SILENT = Console(quiet=True)
NAMES = ("a.png", "deep/er/b.png", "deep/empty.png")
# Image, box, crowd.
BOXES = [(0, [10, 12, 20, 26], 0), (0, [50, 8, 8, 11], 1), (1, [30.5, 20, 15, 19], 0)]


def content() -> dict[str, Any]:
    return {
        "images": [
            {"id": number, "file_name": name, "width": 80, "height": 60} for number, name in enumerate(NAMES)
        ],
        "annotations": [
            {"id": number, "image_id": image, "category_id": 0, "bbox": box, "iscrowd": crowd}
            for number, (image, box, crowd) in enumerate(BOXES)
        ],
        "categories": [{"id": 0, "name": "face"}],
    }


def written(root: Path, annotations: dict[str, Any]) -> list[str]:
    """Options that read the images with these annotations, to train and to score on."""
    for split in ("train", "val"):
        for image in annotations["images"]:
            path = root / split / image["file_name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
        file = root / "annotations" / f"instances_{split}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(annotations))
    return ["--data.source", "coco", "--data.root", str(root), "--data.patch.size", "64"]


def task_of(words: list[str]) -> FaceDetection:
    recipe = load_recipe(TINY, words)
    assert isinstance(recipe, FaceDetectionConfig)
    return recipe.build_task()


def test_crowds_are_neither_learned_nor_counted(tmp_path: Path) -> None:
    task = task_of(written(tmp_path, content()))
    task.check()
    data: Any = task.train_set()
    assert [data.boxes(number).tolist() for number in range(3)] == [[BOXES[0][1]], [BOXES[2][1]], []]
    found = {("." if "/" not in name else name.rpartition("/")[0], Path(name).stem): [] for name in NAMES}
    assert set(task._truth) == set(found)
    rows = {image: np.zeros((0, 5)) for image in found}
    rows[".", "a"] = np.array([[*BOXES[0][1], 0.9], [*BOXES[1][1], 0.8]])
    assert task.score_detections(rows) == {"hard_ap": pytest.approx(50)}
    rows["deep/er", "b"] = np.array([[*BOXES[2][1], 0.7]])
    assert task.score_detections(rows) == {"hard_ap": pytest.approx(100)}


def test_detections_are_saved_and_read_at_any_depth(tmp_path: Path) -> None:
    task = task_of(written(tmp_path / "data", content()))
    rows = {image: np.array([[1.0, 2, 3, 4, 0.5]]) for image in task._truth}
    task.write_detections(tmp_path / "found", rows)
    assert {str(path.relative_to(tmp_path / "found")) for path in (tmp_path / "found").rglob("*.txt")} == {
        *("a.txt", "deep/er/b.txt", "deep/empty.txt")
    }
    read = task.read_detections(tmp_path / "found")
    assert {image: array.tolist() for image, array in read.items()} == {
        image: array.tolist() for image, array in rows.items()
    }


def test_a_run_trains_and_scores(tmp_path: Path) -> None:
    words = [*written(tmp_path / "data", content()), "--epochs", "1"]
    recipe, folder = load_recipe(TINY, words), tmp_path / "run"
    train(recipe, folder, SILENT)
    (row,) = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    assert [name for name in row if name.endswith("_ap")] == ["hard_ap"]
    found = evaluate_checkpoint(recipe, folder / "last.pt", None, SILENT, save_detections=tmp_path / "found")
    assert evaluate_detections(recipe, tmp_path / "found", None, SILENT) == pytest.approx(found)


def test_which_of_several_categories_are_faces_must_be_said(tmp_path: Path) -> None:
    annotations = content()
    annotations["categories"].append({"id": 7, "name": "person"})
    annotations["annotations"][0]["category_id"] = 7
    words = written(tmp_path, annotations)
    with pytest.raises(SettingsError, match=r"has 2 categories \(face, person\).*--data\.categories"):
        task_of(words).check()
    data: Any = task_of([*words, "--data.categories", "[person]"]).train_set()
    assert [len(data.boxes(number)) for number in range(3)] == [1, 0, 0]


def test_names_that_differ_in_their_suffixes_only(tmp_path: Path) -> None:
    annotations = content()
    annotations["images"][1]["file_name"] = "a.jpg"
    with pytest.raises(SettingsError, match=r"the images 'a\.png' and 'a\.jpg' have the same name"):
        task_of(written(tmp_path, annotations)).check()
