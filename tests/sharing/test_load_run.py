"""`polynl.load_run`: a trained classifier or detector, ready to use, from a run or from its weights alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run as polynl_command
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file

import polynl
from polynl.data.images import UnreadableImageError
from polynl.errors import SettingsError
from polynl.models.about import ENTRY, about_file
from polynl.models.weights import MisfitError, load_weights
from polynl.predict.guesses import Guess
from polynl.tasks.detections import Detections
from polynl.train.loop import train
from polynl.train.recipe_file import load_recipe

TESTS = Path(__file__).parents[1]
TINY = TESTS / "train" / "tiny.yaml"
SILENT = Console(quiet=True)


def test_a_classifier_in_one_call(classifier: Path, photo: Path) -> None:
    run = polynl.load_run(classifier)
    assert run.labels == {
        int(n): name for n, name in json.loads((classifier / "labels.json").read_text()).items()
    }
    assert not run.model.training
    logits = run.model(run.preprocess(photo))
    assert logits.shape == (1, len(run.labels))
    guesses = run.predict(photo, top=2)
    assert guesses == run.predict(photo)[:2]
    best = int(logits.argmax())
    assert guesses[0] == Guess(best, run.labels[best], pytest.approx(logits.softmax(1).max().item()))


def test_it_says_what_the_command_says(
    classifier: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'report'")
    code, _, _ = polynl_command(capsys, "predict", photo, "--checkpoint", classifier, "--out", tmp_path)
    assert code == 0
    (image,) = json.loads((tmp_path / "predictions.json").read_text())["images"]
    assert image["predictions"] == [guess._asdict() for guess in polynl.load_run(classifier).predict(photo)]


@pytest.mark.parametrize("kind", ["instances", "faces"])
def test_a_detector_in_one_call(kind: str, runs: dict[str, Path], photo: Path) -> None:
    run = polynl.load_run(runs[kind])
    (output,) = run.model(run.preprocess(photo))
    found = run.predict(photo, threshold=0.0)
    assert isinstance(found, Detections)
    assert torch.equal(found.boxes, output["boxes"])
    assert (found.masks is not None) == (kind == "instances")
    assert set(found.labels.tolist()) <= set(run.labels)
    half = float(found.scores.median())
    assert len(run.predict(photo, threshold=half)) == int((found.scores >= half).sum()) < len(found)


def test_files_pictures_and_tensors_are_the_same(classifier: Path, photo: Path) -> None:
    run = polynl.load_run(classifier)
    picture = Image.open(photo)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    for image in (str(photo), picture, pixels):
        assert torch.equal(run.preprocess(image), run.preprocess(photo))


def test_a_picture_is_turned_upright_as_its_file_is(classifier: Path, photo: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(photo).save(tmp_path / "turned.png", exif=exif)
    run, turned = polynl.load_run(classifier), Image.open(tmp_path / "turned.png")
    assert torch.equal(run.preprocess(turned), run.preprocess(tmp_path / "turned.png"))
    assert not torch.equal(run.preprocess(turned), run.preprocess(photo))


@pytest.mark.parametrize("shape", [(3, 8), (1, 8, 8), (8, 8, 3)])
def test_a_tensor_that_is_no_image(shape: tuple[int, ...], classifier: Path) -> None:
    run = polynl.load_run(classifier)
    with pytest.raises(ValueError, match=r"image: expected uint8 \(3, h, w\), got torch.uint8 \("):
        run.predict(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        run.predict(torch.zeros(3, 8, 8))
    with pytest.raises(TypeError, match="image is a ndarray; expected a file, an image of PIL or"):
        run.predict(torch.zeros(shape).numpy())


def test_images_that_cannot_be_used(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(UnreadableImageError, match=r"text\.png is not a readable image"):
        polynl.load_run(runs["classes"]).predict(tmp_path / "text.png")
    with pytest.raises(UnreadableImageError, match="the image is 200 wide and 2 high"):
        polynl.load_run(runs["faces"]).predict(torch.zeros(3, 2, 200, dtype=torch.uint8))


def test_options_of_the_other_kind(runs: dict[str, Path], photo: Path) -> None:
    with pytest.raises(ValueError, match=r"threshold=0\.5 is for detectors; use top"):
        polynl.load_run(runs["classes"]).predict(photo, threshold=0.5)
    with pytest.raises(ValueError, match="top=2 is for classifiers; use threshold"):
        polynl.load_run(runs["faces"]).predict(photo, top=2)
    with pytest.raises(ValueError, match="top=-1: expected a number above 0"):
        polynl.load_run(runs["classes"]).predict(photo, top=-1)


@pytest.mark.parametrize("kind", ["classes", "instances", "faces"])
def test_the_weights_alone_are_enough(kind: str, runs: dict[str, Path], photo: Path, tmp_path: Path) -> None:
    shutil.copy(runs[kind] / "best.safetensors", tmp_path / "anything.safetensors")
    alone, run = polynl.load_run(tmp_path / "anything.safetensors"), polynl.load_run(runs[kind])
    assert alone.labels == run.labels
    ours, theirs = (one.model(one.preprocess(photo)) for one in (alone, run))
    if kind == "classes":
        assert torch.equal(ours, theirs)
    else:
        assert torch.equal(ours[0]["boxes"], theirs[0]["boxes"])


def test_commands_take_the_weights_alone_too(
    classifier: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'report'")
    shutil.copy(classifier / "best.safetensors", tmp_path / "w.safetensors")
    out = tmp_path / "out"
    code, shown, err = polynl_command(
        capsys, "predict", photo, "--checkpoint", tmp_path / "w.safetensors", "--out", out
    )
    assert (code, err) == (0, "")
    assert str(polynl.load_run(classifier).predict(photo)[0]) in shown


@pytest.mark.parametrize("name", ["best.safetensors", "last.safetensors", "last.pt"])
def test_any_checkpoint_of_a_run(name: str, classifier: Path, photo: Path) -> None:
    run = polynl.load_run(classifier / name)
    assert run.model(run.preprocess(photo)).shape == (1, 6)


def test_weights_do_not_tell_where_they_were_trained(runs: dict[str, Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    for split in ("train", "val"):
        for name in "ab":
            (secret / "images" / split / name).mkdir(parents=True)
            Image.new("RGB", (16, 16), "#" + name * 6).save(secret / "images" / split / name / "1.png")
    keys = [
        "--epochs",
        "1",
        "--batch",
        "2",
        "--data.source",
        "image_folder",
        "--data.root",
        str(secret / "images"),
    ]
    keys += [
        "--data.size",
        "16",
        "--data.resize",
        "16",
        "--model.weights",
        str(runs["classes"] / "best.safetensors"),
    ]
    train(load_recipe(TINY, keys), tmp_path / "run", SILENT)
    assert str(secret) in (tmp_path / "run" / "recipe.yaml").read_text()
    for name in ("best.safetensors", "last.safetensors", "last.pt"):
        assert b"secret" not in (tmp_path / "run" / name).read_bytes()
    about = about_file(tmp_path / "run" / "best.safetensors")
    assert about.recipe["model"]["weights"] == "best.safetensors"
    shutil.copy(tmp_path / "run" / "best.safetensors", tmp_path / "w.safetensors")
    assert polynl.load_run(tmp_path / "w.safetensors").labels == {0: "a", 1: "b"}


def test_an_older_run_loads_with_its_recipe(classifier: Path, photo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(classifier, run)
    save_file(load_file(run / "best.safetensors"), run / "best.safetensors")
    loaded = polynl.load_run(run)
    assert loaded.predict(photo) == polynl.load_run(classifier).predict(photo)
    assert loaded.about == polynl.load_run(classifier).about
    (run / "recipe.yaml").unlink()
    with pytest.raises(SettingsError, match=r"no recipe\.yaml next to"):
        polynl.load_run(run)


def test_a_recipe_that_builds_another_network(classifier: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(classifier, run)
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("options: {}", "options: {window: 3}"))
    with pytest.raises(SettingsError, match=r"^'.*polynl_before\.window is 3 \(in the file null\)"):
        polynl.load_run(run)


def test_weights_of_another_shape_say_what_they_are_of(classifier: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        MisfitError, match=r"missing: .*It was trained with arch small_resnet, .*block poly_nl"
    ):
        load_weights(model, classifier / "best.safetensors")


def test_a_file_does_not_decide_what_is_imported(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import pathlib, polynl.models.small_resnet as s\n"
        f"pathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
        "def network(num_classes): return s.SmallResNet(num_classes=num_classes, depth=1, width=4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file, about = tmp_path / "w.safetensors", json.loads(_text(classifier))
    about["recipe"]["model"] |= {"arch": "mine:network", "arch_options": {}}
    save_file(load_file(classifier / "best.safetensors"), file, {ENTRY: json.dumps(about)})
    with pytest.raises(SettingsError, match="is built by mine:network, which would be imported and called"):
        polynl.load_run(file)
    assert not (tmp_path / "imported").exists()
    assert polynl.load_run(file, allow_import=True).labels[0] == "disc"
    assert (tmp_path / "imported").exists()


def _text(run: Path) -> str:
    about = about_file(run / "best.safetensors")
    assert about is not None
    return about.to_json()


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_no_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"there is no (run|checkpoint)"):
        polynl.load_run(tmp_path / name)


def test_other_weights_with_a_recipe(classifier: Path, photo: Path, tmp_path: Path) -> None:
    torch.save(load_file(classifier / "best.safetensors"), tmp_path / "w.pth")
    (tmp_path / "labels.txt").write_text("\n".join("abcdef"))
    keys: dict[str, Any] = {"recipe": str(TINY), "labels": tmp_path / "labels.txt"}
    run = polynl.load_run(tmp_path / "w.pth", overrides=["--seed", "5"], **keys)
    assert (run.recipe.seed, run.labels[0]) == (5, "a")
    ours, theirs = run.predict(photo), polynl.load_run(classifier).predict(photo)
    assert [guess.number for guess in ours] == [guess.number for guess in theirs]
    (tmp_path / "labels.txt").write_text("a\nb")
    with pytest.raises(SettingsError, match=r"^labels: .*labels\.txt names 2 classes; the network has 6"):
        polynl.load_run(classifier, labels=tmp_path / "labels.txt")
