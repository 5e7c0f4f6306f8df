"""YOLO's text labels become COCO annotations, and mistakes in them are named with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from PIL import Image
from rich.console import Console

from polynl.data.yolo import export_yolo
from polynl.errors import SettingsError
from polynl.tasks.coco.annotations import read_annotations

SILENT = Console(quiet=True)
WIDTH, HEIGHT = 40, 20
YAML = "train: images/train\nval: images/val\nnames: [cat, dog]\n"
LABELS = {
    "train/a.jpg": "0 0.5 0.5 0.25 0.5\n1 0.1 0.1 0.4 0.2\r\n\n0 0.5 0.5 0.25 0.5\n",
    "train/deep/b.png": "1.0 0.25 0.25 0.75 0.25 0.75 0.75\n",
    "train/empty.png": "",
    "train/unlabelled.png": None,
    "val/c.png": "\ufeff0 0.5 0.5 1 1",
}


def write(root: Path, labels: dict[str, str | None] | None = None, content: str = YAML) -> Path:
    """A data set in YOLO's layout; returns its YAML file."""
    for name, text in (LABELS if labels is None else LABELS | labels).items():
        image, label = root / "images" / name, (root / "labels" / name).with_suffix(".txt")
        for path in (image, label):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (WIDTH, HEIGHT)).save(image)
        if text is not None:
            label.write_text(text, newline="")
    (root / "data.yaml").write_text(content)
    return root / "data.yaml"


def exported(file: Path, split: str = "train") -> dict[str, Any]:
    export_yolo(file, None, SILENT)
    return json.loads((file.parent / "annotations" / f"instances_{split}.json").read_text())


def test_labels_become_boxes_and_masks_in_pixels(tmp_path: Path) -> None:
    content = exported(write(tmp_path))
    assert content["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    assert content["images"][0] == {"id": 1, "file_name": "a.jpg", "width": WIDTH, "height": HEIGHT}
    names = [image["file_name"] for image in content["images"]]
    assert names == ["a.jpg", "deep/b.png", "empty.png", "unlabelled.png"]
    # The second box starts left of the image; the first line is there twice.
    assert [(entry["image_id"], entry["category_id"], entry["bbox"]) for entry in content["annotations"]] == [
        *[(1, 1, [15, 5, 10, 10]), (1, 2, [0, 0, 12, 4]), (2, 2, [10, 5, 20, 10])]
    ]
    assert [entry["area"] for entry in content["annotations"]] == [100, 48, 100]
    assert content["annotations"][2]["segmentation"] == [[10, 5, 30, 5, 30, 15]]
    assert "segmentation" not in content["annotations"][0]


def test_annotations_are_what_training_reads(tmp_path: Path) -> None:
    write(tmp_path)
    export_yolo(tmp_path, tmp_path / "coco", SILENT)
    read = read_annotations(
        tmp_path / "coco" / "instances_val.json", tmp_path / "images" / "val", masks=False
    )
    assert read.categories == {1: "cat", 2: "dog"}
    assert [entry["bbox"] for entry in read.content["annotations"]] == [[0, 0, WIDTH, HEIGHT]]


@pytest.mark.parametrize(
    "content",
    [
        "path: .\ntrain: [images/train]\nval: val.txt\nnc: 2\nnames: {0: cat, 1: dog}\n",
        "path: elsewhere\ntrain: ../images/train\nval: ../images/val\nnames: [cat, dog]\n",
    ],
)
def test_ways_to_name_the_images(content: str, tmp_path: Path) -> None:
    file = write(tmp_path, content=content)
    (tmp_path / "val.txt").write_text("./images/val/c.png\n")
    assert [image["file_name"] for image in exported(file)["images"]][:2] == ["a.jpg", "deep/b.png"]
    assert len(json.loads((tmp_path / "annotations" / "instances_val.json").read_text())["images"]) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0 0.5 0.5 0.1", "expected class cx cy w h"),
        ("0 0.5 0.5 0.1 0.1 0.9", "expected class cx cy w h"),
        ("cat 0.5 0.5 0.1 0.1", "cat is not a class: expected one of the 2 numbers"),
        ("2 0.5 0.5 0.1 0.1", "2 is not a class"),
        ("-1 0.5 0.5 0.1 0.1", "-1 is not a class"),
        ("0 20 10 8 8", "20 is not a fraction of the image's side"),
        ("0 0.5 nan 0.1 0.1", "nan is not a fraction"),
        ("0 0.5 0.5 0 0.1", "the box has no extent"),
        ("0 0.5 0.5 -0.005 0.1", "the box has no extent"),
        ("0,0.5,0.5,0.1,0.1", "expected class cx cy w h"),
    ],
)
def test_wrong_lines_are_named(line: str, expected: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"train/a.jpg": f"0 0.5 0.5 0.1 0.1\n\n{line}\n"})
    with pytest.raises(SettingsError) as error:
        export_yolo(file, None, SILENT)
    assert str(error.value).startswith(f"{tmp_path / 'labels/train/a.txt'}, line 3: '{line}': ")
    assert expected in str(error.value)
    assert not (tmp_path / "annotations").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("train: [", "data.yaml is not valid YAML"),
        ("[a]", "expected keys such as train, val and names"),
        ("train: images/train\nval: images/val\n", "names is None: expected the names of the classes"),
        (YAML.replace("[cat, dog]", "[cat, no]"), "the name of class 1 is False: put it in quotes"),
        (YAML.replace("[cat, dog]", "{a: cat}"), "names has the class 'a': expected numbers from 0 on"),
        (YAML + "nc: 3", "nc is 3, and there are 2 names"),
        (YAML + "kpt_shape: [17, 3]", "labels with keypoints cannot be converted"),
        ("train: images/train\nnames: [cat, dog]", "val is None: expected a folder of images"),
        (YAML.replace("images/val", "images/test"), "val: no such folder or file: "),
        (YAML.replace("images/val", "labels"), "val: there is no image in "),
        (YAML.replace("images/val", "list.txt"), "list.txt, line 1: no such image: "),
    ],
)
def test_wrong_data_files_are_named(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("gone.png\n")
    with pytest.raises(SettingsError) as error:
        export_yolo(write(tmp_path, content=content), None, SILENT)
    assert expected in str(error.value)


def test_no_labels_at_all(tmp_path: Path) -> None:
    file = write(tmp_path)
    (tmp_path / "labels").rename(tmp_path / "annotated")
    with pytest.raises(SettingsError, match=r"has labels: the first one's would be in .*labels/train/a\.txt"):
        export_yolo(file, None, SILENT)


def test_images_that_are_damaged_or_turned(tmp_path: Path) -> None:
    file = write(tmp_path)
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "images/train/a.jpg", exif=turned)
    with pytest.raises(SettingsError, match=r"a\.jpg is stored turned .* save it upright"):
        export_yolo(file, None, SILENT)
    (tmp_path / "images/train/a.jpg").write_bytes(b"no image")
    with pytest.raises(SettingsError, match=r"a\.jpg is not a readable image: it has no known format"):
        export_yolo(file, None, SILENT)


def test_the_command_says_how_to_train_and_replaces_only_on_demand(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path)
    code, shown, _ = run(capsys, "data", "yolo", file)
    assert code == 0
    assert "instances_train.json: 4 images, 3 objects, 2 images without any" in shown
    assert f"polynl train boxes_small --data.root {tmp_path} --data.train images/train" in shown
    code, _, error = run(capsys, "data", "yolo", file)
    assert code == 2
    assert "instances_train.json already exists: replace it with --overwrite" in error
    assert run(capsys, "data", "yolo", file, "--overwrite")[0] == 0
