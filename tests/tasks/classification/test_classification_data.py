"""Folders of images: what is in them, crops of it, and what a user sees of the images that are bad."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from PIL import ExifTags, Image
from torch import Tensor
from torchvision.transforms import v2

from polynl.data.images import Unreadable, UnreadableImageError, read_image, val_transform
from polynl.tasks.classification.data import FolderImages, class_folders, train_transform
from polynl.train.recipe_file import load_recipe

SMALL = "--model.arch-options.depth 1 --model.arch-options.width 4 --data.size 16 --data.resize 16 --epochs 1"
SMALL += " --batch 4 --val-batch 2 --threads 1"


def image_folder(root: Path, *, images: int = 3) -> Path:
    """Two classes in two splits, JPEG and PNG."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for number in range(images):
                kind = "PNG" if number % 2 else "JPEG"
                shade = 40 * number + (100 if name == "dog" else 0)
                image = Image.new("RGB", (24, 20), (shade, shade, 255 - shade))
                image.save(root / split / name / f"{number}.{kind.lower()}", kind)
    return root


def broken(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-30])
    return path


def test_a_folder_of_images(tmp_path: Path) -> None:
    root = image_folder(tmp_path) / "train"
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / ".hidden").write_text("no image")
    (root / "list.txt").write_text("0.jpeg")
    (root / "dog" / "puppies").mkdir()
    (root / "dog" / "0.jpeg").rename(root / "dog" / "puppies" / "0.JPG")
    data = FolderImages(root, v2.Identity(), on_bad_image="stop")
    assert len(data) == 6, "folders below a class are looked into, files of other kinds are not"
    for index in range(6):
        sample = data[index]
        assert not isinstance(sample, Unreadable)
        image, label = sample
        assert image.shape == (3, 20, 24)
        assert label == (0 if index < 3 else 1)


def test_what_programs_leave_behind_is_no_class_and_no_image(tmp_path: Path) -> None:
    root = image_folder(tmp_path) / "train"
    image = (root / "cat" / "1.png").read_bytes()
    for copy in (".ipynb_checkpoints/1.png", "__MACOSX/cat/._1.png", "cat/._1.png", "cat/.thumbs/1.png"):
        (root / copy).parent.mkdir(parents=True, exist_ok=True)
        (root / copy).write_bytes(image)
    data = FolderImages(root, v2.Identity(), on_bad_image="stop")
    assert class_folders(root) == ["cat", "dog"]
    assert len(data) == 6
    assert data.notes() == []


def test_files_of_other_kinds_are_counted(tmp_path: Path) -> None:
    root = image_folder(tmp_path) / "train"
    for name in ("cat/a.HEIC", "cat/b.heic", "dog/notes.txt", "dog/README"):
        (root / name).write_text("no image")
    (note,) = FolderImages(root, v2.Identity(), on_bad_image="stop").notes()
    ignored = "2 .heic, 1 without a suffix, 1 .txt"
    assert note == f"Files in {root} that are not images are ignored: {ignored}."


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_photos_are_turned_upright_as_predict_turns_them(tmp_path: Path, kind: str) -> None:
    root = image_folder(tmp_path) / "train"
    path, turned = root / "ant" / f"1.{kind}", Image.Exif()
    path.parent.mkdir()
    turned[ExifTags.Base.Orientation] = 6
    Image.linear_gradient("L").resize((24, 20)).convert("RGB").save(path, exif=turned)
    upright, stored = (
        FolderImages(root, v2.Identity(), on_bad_image="stop", upright=upright)[0][0]  # type: ignore[index]
        for upright in (True, False)
    )
    assert (stored.shape, upright.shape) == ((3, 20, 24), (3, 24, 20))
    assert torch.equal(upright, read_image(path, upright=True))
    recipe = load_recipe("finetune", ["--data.root", str(tmp_path), "--data.size", "16"])
    assert recipe.data.upright, "photos of phones are what people fine-tune on"


def test_splits_with_other_classes_say_which_has_them(tmp_path: Path, capsys: Any) -> None:
    root = image_folder(tmp_path)
    (root / "train" / "eel").mkdir()
    (root / "val" / "fox").mkdir()
    code, _, err = run(capsys, "train", "folder", "--data.root", root, "--out", tmp_path / "run")
    assert code == 2
    assert err.endswith("have different classes: only train has eel; only val has fox.\n")


def test_an_unreadable_image_stops_or_is_stood_in_for(tmp_path: Path) -> None:
    root = image_folder(tmp_path) / "train"
    path = broken(root / "cat" / "1.png")
    with pytest.raises(UnreadableImageError) as caught:
        FolderImages(root, v2.Identity(), on_bad_image="stop")[1]
    first, hint = str(caught.value).splitlines()
    assert first.startswith(f"{path} is not a readable image: ")
    assert "--data.on-bad-image skip" in hint
    stand_in = FolderImages(root, v2.Identity(), on_bad_image="skip")[1]
    assert isinstance(stand_in, Unreadable)
    assert (stand_in.path, stand_in.reason) == (str(path), first)


def test_a_mistake_in_the_transform_is_no_bad_image(tmp_path: Path) -> None:
    def mistaken(image: Tensor) -> Tensor:
        raise ZeroDivisionError

    root = image_folder(tmp_path) / "train"
    with pytest.raises(ZeroDivisionError):
        FolderImages(root, mistaken, on_bad_image="skip")[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("side", [1, 7, 300])
def test_crops_of_any_image_have_the_size_asked_for(side: int) -> None:
    image = torch.randint(256, (3, side, 2 * side), dtype=torch.uint8)
    transforms: list[Callable[[Tensor], Tensor]] = [
        train_transform(24, (0.08, 1.0), 0.5),
        val_transform(24, 32),
    ]
    for transform in transforms:
        crop = transform(image)
        assert (crop.shape, crop.dtype) == ((3, 24, 24), torch.uint8)


def test_scoring_cuts_out_the_centre_and_training_mirrors_as_often_as_asked() -> None:
    image = torch.arange(256, dtype=torch.uint8).expand(3, 40, 256)[:, :, :60]
    assert torch.equal(val_transform(24, 40)(image), image[:, 8:32, 18:42])
    torch.manual_seed(0)
    mirrored, straight = (train_transform(24, (0.9, 1.0), flip) for flip in (1.0, 0.0))
    for _ in range(10):
        assert mirrored(image)[0, 0, 0] > mirrored(image)[0, 0, -1]
        assert straight(image)[0, 0, 0] < straight(image)[0, 0, -1]


# What a user sees


@pytest.mark.parametrize("workers", [0, 2])
def test_training_stops_at_a_bad_image_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    root = image_folder(tmp_path / "data")
    for path in (root / "train").rglob("*.jpeg"):
        broken(path)
    words = ["folder", "--model.block", "none", "--data.root", root, *SMALL.split(), "--workers", workers]
    code, _, err = run(capsys, "train", *words, "--out", tmp_path / "run")
    assert code == 1
    assert err.startswith(f"polynl: {root}/train/")
    assert ".jpeg is not a readable image: " in err
    assert "--data.on-bad-image skip" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 2, "also if a worker has found it"


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    root = image_folder(tmp_path / "data", images=4)
    broken(root / "train" / "cat" / "0.jpeg")
    broken(root / "train" / "dog" / "1.png")
    broken(root / "val" / "dog" / "2.jpeg")
    words = ["folder", "--model.block", "none", "--data.root", root, *SMALL.split(), "--workers", workers]
    words += ["--data.on-bad-image", "skip"]
    code, out, err = run(capsys, "train", *words, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("epoch 1/1")]
    assert line.endswith("3 unreadable images skipped")
    assert out.count("skipped: ") == 2
    with open(tmp_path / "run" / "metrics.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["skipped"], row["images"]) == ("3", "8")
    words += ["--checkpoint", tmp_path / "run" / "last.safetensors"]
    code, out, err = run(capsys, "evaluate", *words)
    assert (code, err) == (0, "")
    assert "Skipped 1 unreadable image." in out
    top1 = float(next(line.split()[1] for line in out.splitlines() if "top1" in line))
    assert round(top1 * 7 / 100, 3).is_integer(), "7 of 8 images are scored"


def test_a_stopped_run_may_go_on_without_the_bad_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = image_folder(tmp_path / "data", images=4)
    words = [
        "folder",
        "--model.block",
        "none",
        "--data.root",
        root,
        *SMALL.split(),
        "--out",
        tmp_path / "run",
    ]
    code, _, _ = run(capsys, "train", *words)
    assert code == 0
    code, _, err = run(capsys, "train", *words, "--resume", "--data.on-bad-image", "skip")
    assert (code, err) == (0, "")


def test_a_class_without_images_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = image_folder(tmp_path / "data")
    for split in ("train", "val"):
        (root / split / "eel").mkdir()
        (root / split / "eel" / "notes.txt").write_text("no image")
    code, _, err = run(
        capsys,
        "train",
        "folder",
        "--model.block",
        "none",
        "--data.root",
        root,
        *SMALL.split(),
        "--out",
        tmp_path / "run",
    )
    assert code == 2
    assert f"{root / 'train'} has no images in eel; there are files of other kinds (.txt)." in err
    assert len(err.splitlines()) <= 3
