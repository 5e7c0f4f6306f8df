"""`polynl predict` with classifiers: names and probabilities, a contact sheet, the same in files."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from PIL import Image
from safetensors.torch import save_file

from polynl.data.images import read_image
from polynl.models.resnet import resnet
from polynl.models.weights import load_weights
from polynl.predict import classes
from polynl.predict.contact_sheet import LINE, MARGIN, SIDE, Tile, contact_sheet
from polynl.predict.guesses import Guess
from polynl.tasks.classification.imagenet import IMAGENET_NAMES, with_imagenet_names
from polynl.train.recipe_file import load_recipe, to_yaml

TINY = Path(__file__).parents[1] / "train" / "tiny.yaml"
NAMES = ["ant", "bee", "cat", "dog", "eel", "fox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has not trained."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    labels = dict(enumerate(NAMES))
    save_file(load_recipe(TINY).build_task(labels).model().state_dict(), folder / "best.safetensors")
    (folder / "recipe.yaml").write_text(to_yaml(load_recipe(TINY)))
    (folder / "labels.json").write_text(json.dumps(labels))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for name, shape in (("a.png", (40, 64, 3)), ("b.jpg", (90, 50, 3)), ("thin.png", (4, 600, 3))):
        Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)).save(folder / name)
    return folder


def predict(capsys: Any, out: Path, *words: object) -> tuple[int, str, str]:
    return run(capsys, "predict", *words, "--out", out)


@pytest.mark.parametrize("checkpoint", ["", "best.safetensors"])
def test_a_folder_of_images(folder: Path, images: Path, tmp_path: Path, capsys: Any, checkpoint: str) -> None:
    code, shown, err = predict(capsys, tmp_path, images, "--checkpoint", folder / checkpoint, "--top", 2)
    assert (code, err) == (0, "")
    content = json.loads((tmp_path / "predictions.json").read_text())["images"]
    with open(tmp_path / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    task = load_recipe(TINY).build_task(dict(enumerate(NAMES)))
    model = task.model().eval()
    load_weights(model, folder / "best.safetensors", trained=True)
    for number, name in enumerate(("a.png", "b.jpg", "thin.png")):
        with torch.no_grad():
            probabilities = model(task.inputs(task.view()(read_image(images / name)))).softmax(1)[0]
        values, numbers = probabilities.sort(descending=True)
        found = content[number]
        assert found["file_name"] == str(images / name)
        assert [guess["name"] for guess in found["predictions"]] == [NAMES[i] for i in numbers[:2].tolist()]
        assert [guess["probability"] for guess in found["predictions"]] == pytest.approx(values[:2].tolist())
        first, second = (f"{g['name']} {100 * g['probability']:.1f}%" for g in found["predictions"])
        assert f"{images / name}: {first}, {second}\n" in shown
        for rank, (row, guess) in enumerate(zip(rows[2 * number :], found["predictions"], strict=False), 1):
            assert row["image"] == str(images / name)
            assert (row["rank"], row["number"], row["name"]) == (
                str(rank),
                str(guess["number"]),
                guess["name"],
            )
            assert float(row["probability"]) == guess["probability"]
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        assert sheet.size == (2 * (SIDE + MARGIN) + MARGIN, 2 * (SIDE + 4 * LINE + MARGIN) + MARGIN)
    assert f"predictions.csv, predictions.json and contact_sheet.png are in {tmp_path}." in shown


def test_nothing_is_written_if_no_image_can_be_read(
    folder: Path, images: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    assert predict(capsys, tmp_path / "out", images, "--checkpoint", folder)[0] == 0
    before = (tmp_path / "out" / "predictions.csv").read_bytes()
    code, shown, err = predict(capsys, tmp_path / "out", tmp_path / "notes.txt", "--checkpoint", folder)
    assert (code, err) == (1, "polynl: 1 of 1 images could not be read, see above.\n")
    assert "predictions.csv" not in shown
    assert (tmp_path / "out" / "predictions.csv").read_bytes() == before, "earlier predictions are kept"


def test_folders_of_folders_and_hidden_files(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(images, tmp_path / "photos" / "one")
    code, _, err = predict(capsys, tmp_path / "out", tmp_path / "photos", "--checkpoint", folder)
    assert code == 2
    assert f"there is no image in the folder {tmp_path / 'photos'}. Those below it are not looked for" in err
    (tmp_path / "photos" / "one" / "._a.png").write_text("left behind")
    code, _, err = predict(capsys, tmp_path / "out", tmp_path / "photos" / "one", "--checkpoint", folder)
    assert (code, err) == (0, "")


def test_weights_without_the_block_say_how_to_use_them(
    folder: Path, images: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(folder, tmp_path / "run")
    plain = load_recipe(TINY, ["--model.block", "none"]).build_task(dict(enumerate(NAMES))).model()
    save_file(plain.state_dict(), tmp_path / "run" / "best.safetensors")
    code, _, err = predict(capsys, tmp_path / "out", images, "--checkpoint", tmp_path / "run")
    assert code == 2
    assert err.endswith("If it was trained without this block, set --model.block none.\n")
    words = ["--checkpoint", tmp_path / "run", "--model.block", "none"]
    assert predict(capsys, tmp_path / "out", images, *words)[0] == 0


def test_names_from_a_file(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "names.txt").write_text("\n".join(f"class {name}" for name in NAMES) + "\n\n")
    (tmp_path / "names.json").write_text(json.dumps({n: f"class {name}" for n, name in enumerate(NAMES)}))
    plain = predict(capsys, tmp_path, images / "a.png", "--checkpoint", folder)[1].splitlines()[0]
    for file in ("names.txt", "names.json"):
        words = [images / "a.png", "--checkpoint", folder, "--labels", tmp_path / file]
        code, shown, _ = predict(capsys, tmp_path, *words)
        assert code == 0
        assert shown.splitlines()[0].replace("class ", "") == plain
        assert shown.count("class ") == 5, "the default of --top"


def test_published_weights_have_imagenets_names(images: Path, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    small = {"depth": 1, "width": 4}
    torch.save(resnet("small_resnet", arch_options=small).state_dict(), tmp_path / "weights.pth")
    words = [
        images / "a.png",
        "--checkpoint",
        tmp_path / "weights.pth",
        "--recipe",
        "imagenet",
        "--top",
        1000,
    ]
    words += ["--model.block", "none", "--model.arch", "small_resnet", "--model.arch-options", small]
    words += ["--data.size", 16, "--data.resize", 16]
    code, _, err = predict(capsys, tmp_path, *words)
    assert code == 0, err
    (image,) = json.loads((tmp_path / "predictions.json").read_text())["images"]
    found = {guess["number"]: guess["name"] for guess in image["predictions"]}
    assert found == IMAGENET_NAMES
    assert (found[0], found[999]) == ("tench", "toilet tissue")


def test_imagenets_folders_are_shown_in_words() -> None:
    folders = {number: f"n{number:08}" for number in range(1000)}
    assert with_imagenet_names(folders)[1] == "goldfish"
    for others in ({0: "n01440764"}, {**folders, 7: "cats"}):
        assert with_imagenet_names(others) == others


def test_the_sheet_shows_the_first_of_many_images(
    folder: Path, images: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(classes, "MOST_TILES", 1)
    _, shown, _ = predict(capsys, tmp_path, images, "--checkpoint", folder)
    assert "contact_sheet.png, of the first 1 of 3 images, are in" in shown
    assert len(json.loads((tmp_path / "predictions.json").read_text())["images"]) == 3
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        assert sheet.width == SIDE + 2 * MARGIN


def test_a_tile_has_its_picture_and_bars_as_long_as_classes_are_probable() -> None:
    image = torch.zeros(3, 40, 80, dtype=torch.uint8)
    image[0] = 200
    guesses = [Guess(0, "", 0.5), Guess(1, "a name that is much too long for its place", 0.0)]
    sheet = np.asarray(contact_sheet([Tile.of("photo.jpg", image, guesses)])).astype(int)
    red = (sheet == [200, 0, 0]).all(axis=2)
    assert red.sum() == SIDE * (SIDE // 2)
    bar = (sheet == [156, 203, 235]).all(axis=2)[MARGIN + LINE + SIDE + 10]
    assert bar.sum() == pytest.approx(SIDE / 2, abs=1)
    assert (sheet[:, MARGIN + SIDE :] == 255).all(), "nothing is drawn beyond the tile"


def mistaken(folder: Path, images: Path, tmp_path: Path) -> dict[str, tuple[list[Any], str]]:
    words = [images, "--checkpoint", folder, "--labels", tmp_path / "names.txt"]
    (tmp_path / "names.txt").write_text("ant\nbee\n")
    (tmp_path / "names.json").write_text(json.dumps(dict(enumerate(NAMES, start=1))))
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "recipe.yaml", tmp_path / "empty")
    return {
        "labels": (words, f"--labels: {tmp_path / 'names.txt'} names 2 classes; the network has 6."),
        "labels from 1": (
            [*words[:-1], tmp_path / "names.json"],
            f"--labels: {tmp_path / 'names.json'} has no name for the network's class 0.",
        ),
        "no labels": (
            [*words[:-1], tmp_path / "x.txt"],
            f"--labels: {tmp_path / 'x.txt'} cannot be read: No such file",
        ),
        "top": ([*words[:-2], "--top", 0], "--top 0: expected a number above 0."),
        "threshold": ([*words[:-2], "--threshold", 0.5], "--threshold 0.5 is for detectors; use --top"),
        "no checkpoint": (
            [images, "--checkpoint", tmp_path / "empty"],
            f"there is no checkpoint in the folder {tmp_path / 'empty'}.",
        ),
    }


@pytest.mark.parametrize(
    "case", ["labels", "labels from 1", "no labels", "top", "threshold", "no checkpoint"]
)
def test_mistakes(case: str, folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    words, expected = mistaken(folder, images, tmp_path)[case]
    code, _, err = predict(capsys, tmp_path / "out", *words)
    assert code == 2
    assert expected in err
    assert not (tmp_path / "out").exists()


def test_the_sheet_replaces_no_image(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copy(images / "a.png", tmp_path / "contact_sheet.png")
    code, _, err = predict(capsys, tmp_path, tmp_path, "--checkpoint", folder)
    assert code == 2
    assert "is one of the images; choose a folder for the pictures." in err
