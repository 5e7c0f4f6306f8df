"""Instance segmentation: what a recipe's parts mean for data, detector and scores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from polynl import inserted
from polynl.data.config import SceneFiles
from polynl.data.images import Unreadable
from polynl.data.scenes_export import export_scenes
from polynl.errors import SettingsError
from polynl.tasks.base import Batch
from polynl.tasks.instance_segmentation.config import InstanceSegmentationConfig
from polynl.tasks.instance_segmentation.task import InstanceSegmentation
from polynl.train.recipe_file import load_recipe

TINY = Path(__file__).parents[2] / "tiny_instances.yaml"
DATA = os.environ.get("POLYNL_DATA")
TERMS = {f"loss_{part}" for part in ("classifier", "box_reg", "mask", "objectness", "rpn_box_reg")}


def task_of(*overrides: object) -> InstanceSegmentation:
    recipe = load_recipe(TINY, [str(word) for word in overrides])
    assert isinstance(recipe, InstanceSegmentationConfig)
    return recipe.build_task()


def batch_of(task: InstanceSegmentation, count: int = 2) -> Batch:
    data = task.train_set()
    return task.collate([data[index] for index in range(count)], training=True)


def perfect(task: InstanceSegmentation) -> list[dict[str, Any]]:
    truth = task.val_set().ground_truth  # type: ignore[attr-defined]
    kept = ("image_id", "category_id", "bbox", "segmentation")
    things = [entry for entry in truth["annotations"] if not entry["iscrowd"]]
    return [{name: entry[name] for name in kept} | {"score": 0.9} for entry in things]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    export_scenes(SceneFiles(images=4, val_images=3, size=32, difficulty="easy"), folder, Console(quiet=True))
    return folder


@pytest.fixture
def coco(exported: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Options that read the exported scenes, after `change` has had its way with an annotation file."""

    def options(
        split: str = "val", change: Callable[[dict[str, Any]], Any] = lambda content: None
    ) -> list[str]:
        words = ["--data.source", "coco", "--data.root", str(exported), "--data.train", "train"]
        words += ["--data.val", "val"]
        for name in ("train", "val"):
            content = json.loads((exported / f"annotations/instances_{name}.json").read_text())
            if name == split:
                change(content)
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
            words += [f"--data.{name}-annotations", str(tmp_path / f"{name}.json")]
        return words

    return options


# Training


def test_losses_are_those_of_the_detector_on_images_from_0_to_1() -> None:
    task = task_of()
    batch = batch_of(task)
    torch.manual_seed(0)
    model = task.model().train()
    torch.manual_seed(1)
    losses = task.losses(model, batch)
    assert set(losses) == TERMS
    torch.manual_seed(1)
    expected = model([image.double().div(255).float() for image in batch.images], batch.targets)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(
        {name: loss.item() for name, loss in expected.items()}, rel=1e-5
    )


def test_gradients_reach_the_block() -> None:
    task = task_of("--model.options.init", "random", "--model.trainable-stages", "1")
    torch.manual_seed(0)
    model = task.model().train()
    torch.stack(list(task.losses(model, batch_of(task)).values())).sum().backward()
    (block,) = inserted(model).values()
    assert all(parameter.grad.any() for parameter in block.parameters())


def test_it_learns_a_handful_of_scenes_by_heart() -> None:
    """Poly-NL in place, from scratch, in a hundred steps."""
    steps, images = 100, 4
    task = task_of("--data.images", images, "--data.flip", 0)
    torch.manual_seed(0)
    model, batch = task.model(), batch_of(task, images)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.006)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.006, total_steps=steps, pct_start=0.1)
    before = scored(task, model, batch)
    model.train()
    for _ in range(steps):
        loss = torch.stack(list(task.losses(model, batch).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    after = scored(task, model, batch)
    assert max(before.values()) < 1
    assert after["box_ap50"] > 85
    assert after["mask_ap50"] > 85
    assert after["box_ap"] > 50
    assert after["mask_ap"] > 50
    (block,) = inserted(model).values()
    assert block.beta.any(), "the block has a part in it"


def scored(task: InstanceSegmentation, model: nn.Module, batch: Batch) -> dict[str, float]:
    """The scores on images that were trained on."""
    from polynl.tasks.coco.metric import coco_scores

    model.eval()
    with torch.no_grad():
        found = task.by_image(batch.targets, task.detect(model, batch.images))
    detections = [detection for one in found.values() for detection in one]
    return coco_scores(task.train_set().ground_truth, detections)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("grouped", "expected"), [("true", True), ("false", False)])
def test_batches_of_like_shapes(coco: Callable[..., list[str]], grouped: str, expected: bool) -> None:
    def widen(content: dict[str, Any]) -> None:
        content["images"][1]["width"] *= 4
        for entry in content["annotations"]:
            entry["segmentation"] = [[1, 1, 5, 1, 5, 5]]

    task = task_of(*coco("train", widen), "--data.group-by-aspect", grouped)
    assert task.groups() == ([4, 7, 4, 4] if expected else None)


# Scores


def test_perfect_detections_have_full_marks_and_none_have_none(tmp_path: Path) -> None:
    task = task_of()
    found = perfect(task)
    (tmp_path / "found.json").write_text(json.dumps(found))
    read = task.read_detections(tmp_path / "found.json")
    scores = task.score_detections(read)
    assert scores["box_ap"] == scores["mask_ap"] == scores["box_ap75"] == pytest.approx(100)
    assert {task.best_by, *task.headline} <= scores.keys()
    assert set(task.score_detections(dict.fromkeys(read, ())).values()) == {0.0}
    some = {image: read[image] for image in (0, 1)}
    assert task.score_detections(some)["mask_ap"] == pytest.approx(100)
    assert task.score_detections({image: some.get(image, ()) for image in read})["mask_ap"] < 90


class Oracle(nn.Module):
    """Finds what is there, in the images to score on, in their order; labels as the task numbers them."""

    def __init__(self, task: InstanceSegmentation, labels: dict[int, int]) -> None:
        super().__init__()
        self._data, self._labels, self._next = task.val_set(), labels, 0

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        from pycocotools import mask as coco_mask

        found = []
        for _ in images:
            image = self._data.ground_truth["images"][self._next]  # type: ignore[attr-defined]
            things = [
                entry
                for entry in self._data.ground_truth["annotations"]  # type: ignore[attr-defined]
                if entry["image_id"] == image["id"]
            ]
            corners = torch.tensor([entry["bbox"] for entry in things], dtype=torch.float32)
            corners[:, 2:] += corners[:, :2]
            size = image["height"], image["width"]
            rles = [coco_mask.frPyObjects(entry["segmentation"], *size) for entry in things]
            masks = torch.from_numpy(coco_mask.decode(rles)).permute(2, 0, 1)[:, None]
            labels = torch.tensor([self._labels[entry["category_id"]] for entry in things])
            found.append(
                {"boxes": corners, "labels": labels, "scores": torch.ones(len(things)), "masks": masks * 0.8}
            )
            self._next += 1
        return found


@pytest.mark.parametrize(("numbering", "shift"), [("keep", 20), ("renumber", 20), ("renumber", -1)])
def test_labels_of_the_model_are_categories_of_the_file(
    coco: Callable[..., list[str]], numbering: str, shift: int
) -> None:
    def renumber(content: dict[str, Any]) -> None:
        for category in content["categories"]:
            category["id"] += shift
        for entry in content["annotations"]:
            entry["category_id"] += shift

    words = coco("train", renumber)
    val = Path(words[-1])
    content = json.loads(val.read_text())
    renumber(content)
    val.write_text(json.dumps(content))
    task = task_of(*words, "--data.category-ids", numbering)
    names = list(task.labels().values())
    first = 1 + shift if numbering == "keep" else 1
    assert list(task.labels()) == list(range(first, first + len(names)))
    outputs = task.model().roi_heads.box_predictor.cls_score.out_features  # type: ignore[union-attr]
    assert outputs == first + len(names)
    category_ids = {1 + shift + place: first + place for place in range(len(names))}
    scorer = task.scorer()
    oracle, data = Oracle(task, category_ids), task.val_set()
    for index in range(len(data)):
        scorer.update(oracle, task.collate([data[index]], training=False))
    scores = scorer.compute([scorer.share()])
    assert scores["box_ap"] == scores["mask_ap"] == pytest.approx(100)


def test_images_that_were_not_seen_are_not_scored() -> None:
    task = task_of()
    oracle, data = Oracle(task, {label: label for label in task.labels()}), task.val_set()
    scorer = task.scorer()
    scorer.update(oracle, task.collate([data[0], Unreadable("x.png", "x.png is no image")], training=False))
    assert scorer.compute([scorer.share()])["mask_ap"] == pytest.approx(100)


def test_unreadable_images_in_a_batch() -> None:
    task = task_of()
    bad, good = Unreadable("x.png", "x.png is no image"), task.train_set()[0]
    training = task.collate([bad, good], training=True)
    assert [image is good[0] for image in training.images] == [True, True]
    assert len(task.collate([bad, good], training=False)) == 1
    assert len(task.collate([bad], training=False)) == 0
    assert training.bad == ("x.png is no image",)


# The detector


def test_the_parts_of_a_recipe_reach_the_detector(tmp_path: Path) -> None:
    task = task_of(
        *("--model.arch", "resnet50", "--model.arch-options", "{}", "--model.placement", "res345"),
        *("--model.norm", "frozen", "--model.norm-eps", 0, "--model.trainable-stages", 2),
        *(
            "--model.anchor-sizes",
            "[8,16,32,64,128]",
            "--model.roi-scale",
            56,
            "--model.stride-in-1x1",
            "true",
        ),
        *("--model.min-size", "[64,80]", "--model.max-size", 100, "--model.options.reduction", 2),
        *("--model.detector-options.box_nms_thresh", 0.4),
    )
    model: Any = task.model()
    body = model.backbone.body
    assert list(inserted(model)) == [
        f"backbone.body.{place}.polynl_before" for place in ("layer2.3", "layer3.5", "layer4.2")
    ]
    assert all(block.reduction == 2 for block in inserted(model).values())
    assert body.bn1.eps == 0
    assert body.layer2[0].conv1.stride == (2, 2)
    assert not body.layer2[0].conv1.weight.requires_grad
    assert body.layer3[0].conv1.weight.requires_grad
    assert (model.transform.min_size, model.transform.max_size) == ([64, 80], 100)
    assert model.rpn.anchor_generator.sizes == ((8,), (16,), (32,), (64,), (128,))
    assert (model.roi_heads.nms_thresh, model.roi_heads.box_roi_pool.canonical_scale) == (0.4, 56)
    assert model.roi_heads.box_predictor.cls_score.in_features == 64
    assert model.roi_heads.mask_predictor.conv5_mask.out_channels == 32


def test_labels_of_a_trained_model_need_no_data() -> None:
    recipe = load_recipe(TINY, ["--data.source", "coco", "--data.root", "nowhere"])
    task = recipe.build_task({1: "cat", 7: "dog"})
    assert task.labels() == {1: "cat", 7: "dog"}
    assert task.model().roi_heads.box_predictor.cls_score.out_features == 8  # type: ignore[union-attr]


# Mistakes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--model.weights nowhere.pth",
            "model.weights: no such file: nowhere.pth. Give yours: --model.weights FILE",
        ),
        (
            "--model.backbone-weights no.pth",
            "model.backbone_weights: no such file: no.pth. Give yours: --model.backbone-weights FILE",
        ),
        ("--model.placement res5", "model: placement 'res5' needs a layer4, and IntermediateLayerGetter"),
        ("--model.anchor-sizes [8,16]", "model: anchor_sizes=[8.0, 16.0]: expected 3 numbers"),
        ("--data.source coco --data.root nowhere", "data.root: no such folder: nowhere. Give yours"),
    ],
)
def test_a_recipe_that_cannot_be_run(words: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        task_of(*words.split()).check()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model.detector-options.box_nms_tresh 0.4", "MaskRCNN has no option 'box_nms_tresh'. Did"),
        (
            "--model.detector-options.box_head 3",
            "polynl sets box_head of MaskRCNN itself; use box_width instead",
        ),
        ("--model.detector-options.rpn_head 3", "rpn_head of MaskRCNN: expected a module, got 3"),
        ("--model.detector-options.kwargs 3", "MaskRCNN has no option 'kwargs'."),
        (
            "--model.detector-options.box_nms_thresh x",
            "box_nms_thresh of MaskRCNN: expected a number, got 'x'",
        ),
        (
            "--model.detector-options.image_mean [0.5]",
            "image_mean of MaskRCNN: expected three numbers, got [0.5]",
        ),
        ("--model.min-size 0", "model.min_size"),
        ("--model.mask-widths []", "model.mask_widths: "),
        ("--model.min-size []", "model.min_size: "),
        ("--model.anchor-sizes [8,-1,3]", "model.anchor_sizes.1: expected greater than 0 (got -1)"),
        ("--data.category-ids keep", "data.category_ids: there is no such key."),
    ],
)
def test_a_recipe_that_cannot_be_read(words: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        task_of(*words.split())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("key", "name", "hint"),
    [("val", "vall", " Did you mean val?"), ("train-annotations", "annotations/instances.json", "")],
)
def test_a_folder_or_file_that_is_not_there(
    coco: Callable[..., list[str]], key: str, name: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        task_of(*coco(), f"--data.{key}", name).check()
    message = str(caught.value)
    assert message.startswith(f"data.{key.replace('-', '_')}: no such f")
    assert f"--data.{key} NAME" in message
    assert f"{name}.{hint}" in message


def test_scoring_needs_no_training_images(coco: Callable[..., list[str]], tmp_path: Path) -> None:
    words = coco()
    words[words.index("--data.train") + 1] = "gone"
    words[words.index("--data.train-annotations") + 1] = "gone.json"
    task = task_of(*words, "--model.weights", "gone.pth")
    task.check(training=False)
    assert len(task.val_set()) == 3
    assert len(task.labels()) == 7
    with pytest.raises(SettingsError, match=r"data\.train: no such folder"):
        task.check()


def test_some_categories_of_a_results_file(coco: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(json.dumps(perfect(task_of(*coco()))))
    task = task_of(*coco(), "--data.categories", "[cue]")
    assert task.labels() == {7: "cue"}
    found = task.read_detections(tmp_path / "found.json")
    assert {one["category_id"] for entries in found.values() for one in entries} == {7}
    assert task.score_detections(found)["mask_ap"] == pytest.approx(100)
    (tmp_path / "found.json").write_text(
        '[{"image_id": 0, "category_id": 8, "score": 1, "bbox": [1, 2, 3, 4]}]'
    )
    with pytest.raises(SettingsError, match="category_id is 8: expected one of"):
        task.read_detections(tmp_path / "found.json")


def test_splits_with_different_categories(coco: Callable[..., list[str]]) -> None:
    words = coco("val", lambda content: content["categories"][0].update(name="disk"))
    with pytest.raises(SettingsError, match=r"category 1 \(disc\) is only in the training annotations\."):
        task_of(*words).check()


def test_nothing_to_score(coco: Callable[..., list[str]]) -> None:
    with pytest.raises(SettingsError, match=r"val\.json has no object to find"):
        task_of(*coco("val", lambda content: content["annotations"].clear())).check()


# Real data

SMALL = "--model.arch resnet18 --model.backbone-weights null --model.min-size 96 --model.max-size 160"


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with COCO images")
def test_coco_images(tmp_path: Path) -> None:
    """Loaded, learned from for two steps, and scored."""
    root = Path(str(DATA), "coco-446")
    recipe = load_recipe(
        "coco_small",
        [f"--data.root={root}", *SMALL.split()],
    )
    task = recipe.build_task()
    task.check()
    assert isinstance(task, InstanceSegmentation)
    assert task.labels()[1] == "person"
    assert max(task.labels()) == 90
    assert (len(task.train_set()), len(task.val_set())) == (286, 158)
    (tmp_path / "found.json").write_text(json.dumps(perfect(task)))
    scores = task.score_detections(task.read_detections(tmp_path / "found.json"))
    assert scores["box_ap"] == scores["mask_ap"] == pytest.approx(100)
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for _ in range(2):
        loss = torch.stack(list(task.losses(model, batch_of(task)).values())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    scorer = task.scorer()
    with torch.no_grad():
        scorer.update(model.eval(), task.collate([task.val_set()[0]], training=False))
    assert 0 <= scorer.compute([scorer.share()])["box_ap"] <= 100
