"""Object detection: boxes train and score without masks, from COCO files and from scenes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from rich.console import Console
from torchvision.models.detection import fasterrcnn_resnet50_fpn

from polynl.data.config import SceneFiles
from polynl.data.scenes_export import export_scenes
from polynl.errors import SettingsError
from polynl.models.faster_rcnn import faster_rcnn
from polynl.tasks.coco.annotations import read_annotations
from polynl.tasks.object_detection.config import ObjectDetectionConfig
from polynl.tasks.object_detection.task import ObjectDetection
from polynl.tasks.outcomes import OUTCOMES, Outcomes
from polynl.train.loop import train
from polynl.train.recipe_file import load_recipe

SILENT = Console(quiet=True)
SIZE = 48
NARROW = "--model.fpn-channels 16 --model.box-width 32 --model.arch-options.width 8 --batch 2 --val-batch 1"
SMALL = f"{NARROW} --epochs 1 --threads 1 --model.min-size {SIZE} --model.max-size {SIZE}".split()
SCORES = {"box_ap", "box_ap50", "box_ap75", "box_ap_small"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes as files whose annotations have no masks, as programs for boxes write them."""
    folder = tmp_path_factory.mktemp("coco")
    export_scenes(SceneFiles(images=4, val_images=3, size=SIZE, difficulty="easy"), folder, SILENT)
    for split in ("train", "val"):
        path = folder / "annotations" / f"instances_{split}.json"
        content = json.loads(path.read_text())
        for number, entry in enumerate(content["annotations"]):
            del entry["segmentation"], entry["area"]
            if number % 2:
                entry["segmentation"] = []
        path.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def words(root: Path) -> list[str]:
    """Options that read these files."""
    found = ["--data.source", "coco", "--data.root", str(root), "--data.train", "train", "--data.val", "val"]
    for split in ("train", "val"):
        found += [f"--data.{split}-annotations", f"annotations/instances_{split}.json"]
    return found


@pytest.fixture(scope="module")
def trained(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, which keeps all detections, however unsure."""
    folder = tmp_path_factory.mktemp("runs") / "poly_nl-res4"
    unsure = ["--model.detector-options.box_score_thresh", "0"]
    train(load_recipe("scenes_boxes", [*words, *SMALL, *unsure]), folder, SILENT)
    return folder


def task_of(*overrides: str) -> ObjectDetection:
    recipe = load_recipe("scenes_boxes", [*SMALL, *overrides])
    assert isinstance(recipe, ObjectDetectionConfig)
    return recipe.build_task()


def perfect(task: ObjectDetection) -> dict[int, list[dict[str, Any]]]:
    truth = task.val_set().ground_truth  # type: ignore[attr-defined]
    found: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in truth["images"]}
    for entry in truth["annotations"]:
        kept = {key: entry[key] for key in ("image_id", "category_id", "bbox")}
        found[entry["image_id"]].append(kept | {"score": 0.9})
    return found


def test_faster_rcnn_has_the_weights_of_torchvisions() -> None:
    with torch.device("meta"):
        ours = faster_rcnn("resnet50").state_dict()
        theirs = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None).state_dict()
    counters = {name for name in theirs if name.endswith("num_batches_tracked")}
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in theirs.items() if name not in counters
    }


@pytest.mark.parametrize(
    ("boxes", "masks"),
    [("coco_boxes", "coco"), ("boxes_small", "coco_small"), ("scenes_boxes", "scenes_instances")],
)
def test_recipes_are_those_of_mask_rcnn_without_masks(boxes: str, masks: str) -> None:
    expected = load_recipe(masks).model_dump()
    del expected["model"]["mask_widths"]
    assert load_recipe(boxes).model_dump() == {**expected, "task": "object_detection"}


@pytest.mark.parametrize("source", ["files", "scenes"])
def test_losses_are_those_of_proposals_and_boxes(source: str, words: list[str]) -> None:
    task = task_of(*(words if source == "files" else ["--data.images", "4", "--data.val-images", "2"]))
    data = task.train_set()
    batch = task.collate([data[0], data[1]], training=True)
    assert batch.targets[0].keys() == {"image_id", "boxes", "labels"}
    torch.manual_seed(0)
    losses = task.losses(task.model().train(), batch)
    assert set(losses) == {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}


@pytest.mark.parametrize("source", ["files", "scenes"])
def test_scores_are_those_of_boxes(source: str, words: list[str]) -> None:
    task = task_of(*(words if source == "files" else ["--data.images", "4", "--data.val-images", "2"]))
    found = perfect(task)
    assert task.score_detections(found) == pytest.approx(dict.fromkeys(SCORES, 100.0))
    found[0] = found[0][1:]
    (scores, outcomes) = task.score_detections(found), task.outcomes(found)
    assert 0 < scores["box_ap"] < 100
    assert ObjectDetection.score_outcomes(outcomes, np.ones((1, len(outcomes)))) == {
        name: pytest.approx([scores[name]]) for name in ObjectDetection.scores
    }
    # Without any detection, none has a mask, and none lacks one.
    nothing = {image: [] for image in found}
    assert task.score_detections(nothing) == dict.fromkeys(SCORES, 0.0)
    assert not any(name.startswith("mask") for name in task.outcomes(nothing).arrays)


def test_areas_are_those_of_the_file_or_of_boxes(root: Path, tmp_path: Path) -> None:
    content = json.loads((root / "annotations/instances_val.json").read_text())
    first, second = content["annotations"][:2]
    first["area"], first["segmentation"] = 7.5, "no mask, and not looked at"
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    read = read_annotations(path, root / "val", masks=False).content["annotations"]
    assert read[0]["area"] == 7.5
    assert read[1]["area"] == second["bbox"][2] * second["bbox"][3]
    assert all("segmentation" not in entry for entry in read)


@pytest.mark.parametrize("left", [{}, {"segmentation": []}])
def test_mask_rcnn_says_how_to_train_on_boxes(left: dict[str, Any], root: Path, tmp_path: Path) -> None:
    content = json.loads((root / "annotations/instances_val.json").read_text())
    content["annotations"] = [{"area": 9, **content["annotations"][0], **left}]
    if not left:
        content["annotations"][0].pop("segmentation", None)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SettingsError, match=r"segmentation.* train a recipe for boxes, such as coco_boxes"):
        read_annotations(path, root / "val")


def test_a_run_leaves_box_scores_and_their_outcomes(trained: Path) -> None:
    (row,) = csv.DictReader((trained / "metrics.csv").read_text().splitlines())
    assert {name for name in row if "_ap" in name} == SCORES
    outcomes = Outcomes.load(trained / OUTCOMES)
    scores = ObjectDetection.score_outcomes(outcomes, np.ones((1, len(outcomes))))
    assert {name: float(row[name]) for name in scores} == pytest.approx(
        {name: values[0] for name, values in scores.items()}, abs=1e-6
    )


def test_commands_take_the_run(trained: Path, root: Path, tmp_path: Path, capsys: Any) -> None:
    weights, images = trained / "best.safetensors", root / "val"
    image = next(images.glob("*/*.png"))
    saved = tmp_path / "found.json"
    scored = ["evaluate", trained / "recipe.yaml", "--checkpoint", weights, "--save-detections", saved]
    again = ["evaluate", trained / "recipe.yaml", "--detections", saved]
    drawn = ["predict", image, "--checkpoint", weights, "--out", tmp_path / "drawn", "--threshold", "0"]
    explained = ["explain", image, "--checkpoint", weights, "--out", tmp_path / "explained"]
    said = []
    for words in (scored, again, drawn, explained, ["report", trained, "--out", tmp_path / "page.html"]):
        code, shown, error = run(capsys, *words)
        assert code == 0, error
        said.append(shown)
    assert "mask" not in said[0]
    assert [line for line in said[0].splitlines() if "box_ap" in line] == [
        line for line in said[1].splitlines() if "box_ap" in line
    ]
    (annotation, *_) = json.loads((tmp_path / "drawn" / "detections.json").read_text())["annotations"]
    assert "segmentation" not in annotation
    assert "Faster R-CNN" in (tmp_path / "page.html").read_text()
