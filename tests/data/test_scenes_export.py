"""Exported scenes, read back by others' loaders; and what happens to the folder when something goes wrong."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from rich.console import Console
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2.functional import pil_to_tensor

from polynl import cli
from polynl.data import scenes_export
from polynl.data.config import SceneFiles
from polynl.data.scenes import CATEGORIES, CLASSES, DIFFICULTIES, Scenes
from polynl.data.scenes_export import export_scenes, run_lengths
from polynl.errors import SettingsError

# pycocotools has not followed NumPy 2 here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)
SILENT = Console(quiet=True)
FEW = SceneFiles(images=50, val_images=40, size=40, difficulty="hard", seed=5)
COUNTS = {"train": 50, "val": 40}


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of `polynl data scenes …`."""
    code = 0
    try:
        cli.main(["data", "scenes", *map(str, words)])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return code, *capsys.readouterr()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def drawn(split: str) -> Scenes:
    return Scenes(COUNTS[split], size=FEW.size, difficulty=FEW.difficulty, split=split, seed=FEW.seed)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes") / "below" / "out"
    export_scenes(FEW, out, SILENT)
    return out


# What is written


@pytest.mark.parametrize("split", COUNTS)
def test_image_folder_reads_the_scenes(exported: Path, split: str) -> None:
    folder, expected = ImageFolder(str(exported / split)), drawn(split)
    assert folder.classes == sorted(CLASSES)
    assert len(folder) == COUNTS[split]
    for path, number in folder.samples:
        image, label = expected[int(Path(path).stem)]
        assert folder.classes[number] == CLASSES[label]
        with Image.open(path) as picture:
            assert torch.equal(pil_to_tensor(picture), image)


@pytest.mark.parametrize("split", COUNTS)
def test_coco_reads_the_scenes(exported: Path, split: str, capsys: pytest.CaptureFixture[str]) -> None:
    coco, expected = COCO(str(exported / "annotations" / f"instances_{split}.json")), drawn(split)
    assert {c["id"]: c["name"] for c in coco.dataset["categories"]} == dict(enumerate(CATEGORIES, 1))
    assert len(coco.imgs) == COUNTS[split]
    assert sorted(coco.anns) == list(range(1, len(coco.dataset["annotations"]) + 1)), (
        "0 is no id for COCOeval"
    )
    for number, image in coco.imgs.items():
        items = expected.instances(number)
        assert image["label"] == CLASSES[expected.labels[number]]
        assert (image["width"], image["height"]) == (40, 40)
        assert (exported / split / image["file_name"]).is_file()
        assert image["file_name"] == f"{image['label']}/{number:06}.png"
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=number))
        assert [a["category_id"] - 1 for a in annotations] == items.categories.tolist()
        for annotation, mask, box in zip(annotations, items.masks, items.boxes, strict=True):
            assert torch.equal(torch.from_numpy(coco.annToMask(annotation)).bool(), mask)
            assert annotation["iscrowd"] == 0
            assert annotation["area"] == mask.sum()
            left, top, width, height = annotation["bbox"]
            assert [left, top, left + width, top + height] == box.tolist()
            encoded = coco_mask.frPyObjects(annotation["segmentation"], 40, 40)
            assert coco_mask.toBbox(encoded).tolist() == annotation["bbox"], "tight, as COCO itself has it"


def test_distractors_and_the_cue_are_annotated(exported: Path) -> None:
    content = json.loads((exported / "annotations" / "instances_val.json").read_text())
    wanted = DIFFICULTIES["hard"]
    items = wanted.figures + wanted.distractors + 1
    assert len(content["annotations"]) == COUNTS["val"] * items
    cues = [a for a in content["annotations"] if a["category_id"] == CATEGORIES.index("cue") + 1]
    assert len(cues) == COUNTS["val"]
    assert content["info"]["seed"] == 5


def test_the_same_options_give_the_same_bytes(exported: Path, tmp_path: Path) -> None:
    first = contents(exported)
    assert len(first) == 50 + 40 + 2
    export_scenes(FEW, tmp_path / "again", SILENT)
    assert contents(tmp_path / "again") == first
    assert {entry.name for entry in exported.iterdir()} == {"train", "val", "annotations"}


@pytest.mark.parametrize("shape", [(5, 7), (1, 9), (9, 1)])
def test_run_lengths_of_any_mask(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    random = [torch.rand(shape, generator=generator) < share for share in (0.2, 0.5, 0.9)]
    for mask in [*random, torch.zeros(shape).bool(), torch.ones(shape).bool()]:
        counts = run_lengths(mask)
        encoded = coco_mask.frPyObjects({"size": list(shape), "counts": counts}, *shape)
        assert torch.equal(torch.from_numpy(coco_mask.decode(encoded)).bool(), mask)
        assert sum(counts) == mask.numel()


# What is there already


def test_a_folder_that_holds_scenes_is_kept_or_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--images", 3, "--val-images", 2, "--size", 16)
    code, out, _ = run(capsys, "--out", tmp_path, *small, "--difficulty", "easy")
    assert code == 0
    assert f"--data.root {tmp_path}" in out
    assert "So few scenes leave some classes empty" in out
    before = contents(tmp_path)
    code, out, err = run(capsys, "--out", tmp_path, *small)
    assert (code, out) == (2, "")
    assert "already contains scenes: replace them with --overwrite" in err
    assert contents(tmp_path) == before
    (tmp_path / "notes.txt").write_text("mine")
    code, _, _ = run(capsys, "--out", tmp_path, *small, "--seed", 1, "--overwrite")
    assert code == 0
    after = contents(tmp_path)
    assert after.pop("notes.txt") == b"mine"
    export_scenes(SceneFiles(images=3, val_images=2, size=16, seed=1), tmp_path / "fresh", SILENT)
    assert after == contents(tmp_path / "fresh")


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_other_files_are_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "tom.jpg").write_bytes(b"a photograph")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_train.json").write_text('{"info": {"description": "COCO 2017"}}')
    before = contents(tmp_path)
    code, _, err = run(capsys, "--out", tmp_path, *options)
    assert code == 2
    assert "already contains files that `polynl data scenes` did not write" in err
    assert contents(tmp_path) == before


def test_an_empty_folder_and_what_a_kill_left_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / scenes_export.UNFINISHED / "train" / "disc").mkdir(parents=True)
    (tmp_path / scenes_export.UNFINISHED / "train" / "disc" / "000000.png").write_bytes(b"half an im")
    export_scenes(SceneFiles(images=2, val_images=1, size=16), tmp_path, SILENT)
    assert len(contents(tmp_path)) == 2 + 1 + 2


# What goes wrong


class Killed(BaseException):
    """The process ends: nothing is cleaned up."""


@pytest.mark.parametrize(
    ("step", "there"),
    [
        *((step, set()) for step in (1, 4, 5, 6, 7)),
        (8, {"train"}),
        (9, {"train", "val"}),
    ],
)
def test_a_kill_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, there: set[str]
) -> None:
    """Steps 1 to 3 write images, 4 their annotations, 5 and 6 the same for val; 7 to 9 move folders."""
    done = 0

    def counted(act: Any) -> Any:
        def killed(*arguments: Any) -> Any:
            nonlocal done
            done += 1
            if done == step:
                raise Killed
            return act(*arguments)

        return killed

    monkeypatch.setattr(Image.Image, "save", counted(Image.Image.save))
    monkeypatch.setattr(scenes_export, "write_atomically", counted(scenes_export.write_atomically))
    monkeypatch.setattr(scenes_export, "os", SimpleNamespace(replace=counted(os.replace)))
    monkeypatch.setattr(scenes_export, "shutil", SimpleNamespace(rmtree=lambda *_, **__: None))
    with pytest.raises(Killed):
        export_scenes(SceneFiles(images=3, val_images=1, size=16), tmp_path, SILENT)
    assert {entry.name for entry in tmp_path.iterdir()} == {scenes_export.UNFINISHED, *there}
    monkeypatch.undo()
    export_scenes(SceneFiles(images=3, val_images=1, size=16), tmp_path, SILENT, overwrite=bool(there))
    assert len(contents(tmp_path)) == 3 + 1 + 2


def full_disk(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["image", "annotations"])
def test_a_full_disk_is_told_and_what_was_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    out = tmp_path / "out"
    export_scenes(SceneFiles(images=2, val_images=1, size=16), out, SILENT)
    before = contents(out)
    if where == "image":
        monkeypatch.setattr(Image.Image, "save", full_disk)
    else:
        monkeypatch.setattr(scenes_export, "write_atomically", full_disk)
    for folder, options in ((tmp_path / "new", ()), (out, ("--overwrite",))):
        code, text, err = run(
            capsys, "--out", folder, "--images", 2, "--val-images", 1, "--size", 16, *options
        )
        assert (code, text) == (1, "")
        assert "cannot be written to: No space left on device." in err
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1
    assert contents(out) == before
    assert not list((tmp_path / "new").iterdir())


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_scenes(SceneFiles(images=2, val_images=1, size=16), tmp_path, SILENT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--images -1", "--images: expected greater than 0 (got -1)"),
        ("--val-images 0", "--val-images: expected greater than 0 (got 0)"),
        ("--size 15", "--size: expected greater than or equal to 16 (got 15)"),
        ("--size 513", "--size: expected less than or equal to 512 (got 513)"),
        ("--seed -1", "--seed: expected greater than or equal to 0 (got -1)"),
        ("--difficulty mediun", "'easy', 'medium', 'hard'"),
        ("--images many", "many"),
        ("--sise 20", "--size"),
    ],
)
def test_a_mistake_gets_a_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    out = tmp_path / "out"
    code, text, err = run(capsys, "--out", out, *words.split())
    assert (code, text) == (2, "")
    assert expected in " ".join(err.replace("│", " ").split())
    assert len(err.splitlines()) <= 12
    assert not out.exists()


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("text")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, _, err = run(capsys, "--out", out)
        assert code == 2
        assert "Not a directory" in err


def test_options_are_checked_from_python_too() -> None:
    with pytest.raises(
        SettingsError, match=r"^--difficulty: expected 'easy', 'medium' or 'hard' \(got 'mediun'\)$"
    ):
        SceneFiles(difficulty="mediun")
