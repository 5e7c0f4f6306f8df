"""Face detection: what a recipe's parts mean for data, detector and scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from polynl import inserted
from polynl.data.images import Unreadable, UnreadableImageError
from polynl.errors import SettingsError
from polynl.tasks.base import Batch
from polynl.tasks.detections import Detections
from polynl.tasks.face_detection import config
from polynl.tasks.face_detection.config import FaceDetectionConfig
from polynl.tasks.face_detection.files import write_predictions
from polynl.tasks.face_detection.metric import SUBSETS, Faces, GroundTruth, wider_face_rows
from polynl.tasks.face_detection.scenes import FaceScenes
from polynl.tasks.face_detection.task import FaceDetection
from polynl.train.recipe_file import load_recipe

TINY = Path(__file__).parents[2] / "tiny_faces.yaml"
DATA = os.environ.get("POLYNL_DATA")
NAMES = ("0--Parade/a.jpg", "0--Parade/b.jpg", "1--Handshaking/c.jpg")
FACES = {
    NAMES[0]: ["10 12 20 26 0 0 0 0 0 0", "50 8 8 11 0 0 0 1 0 0"],
    NAMES[1]: ["0 0 0 0 0 0 0 0 0 0"],
    NAMES[2]: ["30 20 15 19 0 0 0 0 0 0", "5 5 3 4 0 0 0 0 0 0"],
}


def task_of(*overrides: object) -> FaceDetection:
    recipe = load_recipe(TINY, [str(word) for word in overrides])
    assert isinstance(recipe, FaceDetectionConfig)
    return recipe.build_task()


def batch_of(task: FaceDetection, count: int = 2) -> Batch:
    data = task.train_set()
    return task.collate([data[index] for index in range(count)], training=True)


@pytest.fixture
def official(tmp_path: Path) -> list[str]:
    """Options that read three images in WIDER FACE's layout."""
    for split in ("train", "val"):
        lines = []
        for name, faces in FACES.items():
            path = tmp_path / f"WIDER_{split}" / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(len(name)).integers(0, 256, (60, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            count = 0 if faces[0].startswith("0 0 0 0") else len(faces)
            lines += [name, str(count), *faces]
        file = tmp_path / "wider_face_split" / f"wider_face_{split}_bbx_gt.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
    return ["--data.source", "wider_face", "--data.root", str(tmp_path)]


class Oracle(nn.Module):
    """Finds the faces of the images to score on, one after the other, as the detector says it."""

    def __init__(self, task: FaceDetection, scale: float = 1.0) -> None:
        super().__init__()
        truth = task._truth
        self._boxes = [torch.from_numpy(truth[image].boxes).float() / scale for image in truth]
        self._next = 0

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        found = []
        for image in images:
            assert image.max() <= 1
            boxes = self._boxes[self._next]
            corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
            zeros = torch.zeros(len(boxes), dtype=torch.int64)
            found.append({"boxes": corners, "labels": zeros, "scores": torch.linspace(1, 0.5, len(boxes))})
            self._next += 1
        return found


def scored(task: FaceDetection, model: nn.Module) -> dict[str, float]:
    scorer, data = task.scorer(), task.val_set()
    for index in range(len(data)):
        scorer.update(model, task.collate([data[index]], training=False))
    return scorer.compute([scorer.share()])


# Training


def test_losses_are_those_of_the_detector_on_images_from_0_to_1() -> None:
    task = task_of()
    batch = batch_of(task)
    torch.manual_seed(0)
    model = task.model().train()
    losses = task.losses(model, batch)
    assert set(losses) == {"classification", "bbox_regression"}
    faces = [
        {"boxes": target["boxes"], "labels": torch.zeros_like(target["labels"])} for target in batch.targets
    ]
    expected = model([image.double().div(255).float() for image in batch.images], faces)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(
        {name: loss.item() for name, loss in expected.items()}, rel=1e-4
    )


def test_gradients_reach_the_block() -> None:
    task = task_of("--model.options.init", "random")
    torch.manual_seed(0)
    model = task.model().train()
    torch.stack(list(task.losses(model, batch_of(task)).values())).sum().backward()
    (block,) = inserted(model).values()
    assert all(parameter.grad.any() for parameter in block.parameters())


def test_patches_are_what_the_recipe_says(official: list[str]) -> None:
    task = task_of(*official, "--data.patch.size", 40)
    image, target = task.train_set()[0]
    assert image.shape == (3, 40, 40)
    assert set(target["labels"].tolist()) <= {1}
    image, target = task.val_set()[0]
    assert image.shape == (3, 60, 80)
    assert target["name"] == NAMES[0]
    assert task.groups() is None


def patch_of(*words: object) -> tuple[Tensor, Tensor]:
    data = task_of(*words).train_set()
    torch.manual_seed(0)
    image, target = data[2]
    return image, target["boxes"]


@pytest.mark.parametrize("source", ["scenes", "wider_face"])
def test_every_key_of_a_patch_has_a_say(source: str, official: list[str]) -> None:
    words = [*(official if source == "wider_face" else ()), "--data.patch.distort", 0, "--data.flip", 0]
    image, boxes = patch_of(*words)
    assert len(boxes) > 0
    assert torch.equal(patch_of(*words, "--data.flip", 1)[0], image.flip(2))
    assert not torch.equal(patch_of(*words, "--data.patch.distort", 1)[0], image)
    assert not torch.equal(patch_of(*words, "--data.patch.scale", "[0.3,0.3]")[0], image)
    assert len(patch_of(*words, "--data.patch.min-face", 700)[1]) == 0


def test_scenes_are_those_of_the_seed_and_the_split() -> None:
    data = {seed: task_of("--data.seed", seed) for seed in (0, 1)}
    expected = FaceScenes(8, size=64, split="train", seed=1, training=True)
    assert torch.equal(data[1].train_set().images, expected.images)  # type: ignore[attr-defined]
    assert [len(data[0].train_set()), len(data[0].val_set())] == [8, 5]
    firsts = [data[0].train_set().images[0], data[0].val_set()[0][0]]  # type: ignore[attr-defined]
    assert not torch.equal(*firsts)


def test_images_that_cannot_be_read_are_skipped_on_demand(official: list[str], tmp_path: Path) -> None:
    (tmp_path / "WIDER_val" / "images" / NAMES[0]).write_bytes(b"")
    assert isinstance(task_of(*official, "--data.on-bad-image", "skip").val_set()[0], Unreadable)
    with pytest.raises(UnreadableImageError, match=r"a\.jpg"):
        task_of(*official).val_set()[0]


# Scores


def test_what_is_there_has_full_marks(tmp_path: Path) -> None:
    task = task_of("--data.val-images", 20)
    scores = scored(task, Oracle(task))
    assert set(scores) == {"easy_ap", "medium_ap", "hard_ap"} == set(task.headline)
    assert all(score == pytest.approx(100, abs=1e-6) for score in scores.values())
    assert task.best_by in scores


def test_files_score_as_what_they_were_written_from(tmp_path: Path) -> None:
    task = task_of()
    scorer, data, oracle = task.scorer(), task.val_set(), Oracle(task)
    for index in range(len(data)):
        scorer.update(oracle, task.collate([data[index]], training=False))
    scores = scorer.compute([scorer.share()])
    scorer.save(tmp_path / "found")
    assert task.score_detections(task.read_detections(tmp_path / "found")) == scores


def test_without_official_files_all_valid_faces_count_as_hard(official: list[str]) -> None:
    task = task_of(*official)
    task.check()
    assert [task._truth.count(subset) for subset in ("easy", "medium", "hard")] == [0, 0, 3]
    assert scored(task, Oracle(task)) == {"hard_ap": pytest.approx(100)}
    assert task.labels() == {1: "face"}


def test_boxes_are_scaled_to_the_ground_truth(official: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"data\.truth_scale: 2 needs data\.ground_truth, which is not given"
    ):
        task_of(*official, "--data.truth-scale", 2).check()
    found = Detections(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([0.5]), torch.tensor([1]))
    assert wider_face_rows(found, 2.0).tolist() == [[2.0, 4.0, 6.0, 12.0, 0.5]]


def test_official_faces_are_those_of_the_images_at_their_scale(
    official: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images at half size, and fewer of them than the official files have."""
    listed = task_of(*official)._truth
    faces = {
        image: Faces(2 * one.boxes, dict.fromkeys(SUBSETS, one.counted["hard"]))
        for image, one in listed.items()
    }
    whole = GroundTruth({("0--Parade", "other"): faces["0--Parade", "a"], **faces})
    monkeypatch.setattr(config, "read_ground_truth", {tmp_path: whole}.__getitem__)
    task = task_of(*official, "--data.ground-truth", tmp_path, "--data.truth-scale", 2)
    task.check()
    assert list(task._truth) == list(listed)
    full = pytest.approx(100)
    assert scored(task, Oracle(task, scale=2)) == {"easy_ap": full, "medium_ap": full, "hard_ap": full}


def test_images_that_were_not_seen_are_not_scored() -> None:
    task = task_of()
    scorer, data = task.scorer(), task.val_set()
    bad = Unreadable("x.png", "x.png is no image")
    scorer.update(Oracle(task), task.collate([data[0], bad], training=False))
    assert all(score == pytest.approx(100) for score in scorer.compute([scorer.share()]).values())


def test_detections_are_faces() -> None:
    task = task_of("--model.detector-options.score_thresh", 0)
    torch.manual_seed(0)
    with torch.no_grad():
        (found,) = task.detect(task.model().eval(), [torch.zeros(3, 64, 64, dtype=torch.uint8)])
    assert set(found.labels.tolist()) == {1}
    assert task.labels()[1] == "face"


# The detector, and mistakes


def test_the_parts_of_a_recipe_reach_the_detector() -> None:
    task = task_of(
        *("--model.arch", "resnet18", "--model.arch-options", "{}", "--model.levels", "[3,4,5,6]"),
        *("--model.anchor-scale", 2, "--model.positive-iou", 0.5, "--model.negative-iou", 0.4),
        *("--model.norm", "frozen", "--model.detector-options.nms_thresh", 0.3),
    )
    model: Any = task.model()
    assert list(inserted(model)) == ["backbone.body.layer3.1.polynl_before"]
    assert model.anchor_generator.sizes[0][0] == 16
    assert (model.proposal_matcher.high_threshold, model.proposal_matcher.low_threshold) == (0.5, 0.4)
    assert (model.nms_thresh, model.transform.min_size, model.transform.max_size) == (0.3, (64,), 64)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model.levels [1,3]", "model: levels=[1, 3]: expected consecutive numbers"),
        ("--model.positive-iou 0.2", "model: negative_iou=0.35: expected at most positive_iou=0.2"),
        ("--model.weights nowhere.pth", "model.weights: no such file: nowhere.pth."),
        ("--data.source wider_face --data.root nowhere", "data.root: no such folder: nowhere."),
    ],
)
def test_a_recipe_that_cannot_be_run(words: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        task_of(*words.split()).check()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model.detector-options.nms_tresh 0.4", "RetinaNet has no option 'nms_tresh'. Did"),
        (
            "--model.detector-options.fg_iou_thresh 0.4",
            "polynl sets fg_iou_thresh of RetinaNet itself; use positive_iou instead",
        ),
        ("--model.detector-options.kwargs 3", "RetinaNet has no option 'kwargs'."),
        ("--model.positive-iou 35", "model.positive_iou: "),
        ("--data.patch.scale [1,0.5]", "data.patch.scale: expected [from, to] with 0 < from <= to <= 1"),
        ("--data.patch.sise 3", "data.patch.sise: there is no such key. Did you mean size"),
    ],
)
def test_a_recipe_that_cannot_be_read(words: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        task_of(*words.split())
    assert expected in str(caught.value)


def test_no_official_files(official: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"data\.ground_truth: no such folder"):
        task_of(*official, "--data.ground-truth", tmp_path / "gone").check()


def test_no_face_to_score(official: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wider_face_split" / "wider_face_val_bbx_gt.txt"
    file.write_text("".join(f"{name}\n0\n0 0 0 0\n" for name in NAMES))
    with pytest.raises(SettingsError, match="no face on the images to score on counts as Hard"):
        task_of(*official).check()


def test_no_face_to_train_on(official: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wider_face_split" / "wider_face_train_bbx_gt.txt"
    file.write_text("".join(f"{name}\n1\n1 2 9 9 0 0 0 1 0 0\n" for name in NAMES))
    with pytest.raises(
        SettingsError, match="no face to train on: 3 images with 3 faces, of which 3 are flagged"
    ):
        task_of(*official).check()


# Real data


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with WIDER FACE")
def test_wider_face_at_half_size(tmp_path: Path) -> None:
    """Its annotations, at half size, are the official faces."""
    root, truth = Path(str(DATA), "widerface-half"), Path(str(DATA), "widerface-ground-truth")
    words = ["--data.source", "wider_face", "--data.root", root, "--data.truth-scale", 2]
    for split in ("train", "val"):
        words += [f"--data.{split}-annotations", f"wider_face_{split}_bbx_gt.txt"]
    task = task_of(*words, "--data.ground-truth", truth)
    task.check()
    assert (len(task.train_set()), len(task.val_set())) == (400, 200)
    from polynl.tasks.face_detection.data import event_and_name, read_faces

    faces = read_faces(root / "wider_face_val_bbx_gt.txt", root / "WIDER_val" / "images")
    found = {
        event_and_name(image.name): np.concatenate(
            [2 * image.boxes.numpy(), np.ones((len(image.boxes), 1))], axis=1
        )
        for image in faces
    }
    write_predictions(tmp_path, found)
    scores = task.score_detections(task.read_detections(tmp_path))
    # Rounded to half pixels, the tiniest faces overlap their official boxes by less.
    assert scores["easy_ap"] > 99
    assert scores["medium_ap"] > 99
    assert scores["hard_ap"] > 90
