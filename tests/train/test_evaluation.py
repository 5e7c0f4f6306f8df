"""Scores against a count by hand, and `polynl evaluate` on every kind of file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from PIL import Image
from safetensors.torch import load_file
from small_runs import SILENT, TINY, image_folder, tiny
from torch import Tensor, nn

from polynl.errors import RunStoppedError
from polynl.models.resnet import resnet
from polynl.tasks.base import Task
from polynl.train.config import Recipe
from polynl.train.evaluation import evaluate
from polynl.train.loop import train
from polynl.train.processes import Processes

ALONE = Processes(0, 1, torch.device("cpu"))


def random_model(task: Task) -> nn.Module:
    """A network that gives every image a different answer."""
    torch.manual_seed(1)
    model = task.model()
    model(100 * torch.randn(8, 3, 16, 16))
    return model.eval()


def by_hand(model: nn.Module, recipe: Recipe, k: int) -> float:
    """Percent of images whose class is among the k likeliest, image by image."""
    right, data = 0, recipe.build_task().val_set()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (recipe.data.mean, recipe.data.std))
    with torch.no_grad():
        for image, label in (data[index] for index in range(len(data))):
            logits: Tensor = model(((image / 255 - mean) / std)[None])[0]
            likelier = sum(value > logits[label] for value in logits)
            right += int(likelier < k)
    return 100 * right / len(data)


def scores(model: nn.Module, recipe: Recipe) -> dict[str, float]:
    found = evaluate(recipe.build_task(), model, recipe, ALONE)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("batch", [1, 4, 11, 64])
def test_top1_and_top5_are_those_counted_by_hand(batch: int, tmp_path: Path) -> None:
    root = image_folder(tmp_path, 10, images=3)
    words = ["--data.source", "image_folder", "--data.root", str(root), "--data.size", "16"]
    recipe = tiny(*words, "--data.resize", "20", "--val-batch", str(batch))
    model = random_model(recipe.build_task())
    expected = {"top1": by_hand(model, recipe, 1), "top5": by_hand(model, recipe, 5)}
    assert 0 < expected["top1"] < expected["top5"] < 100
    assert scores(model, recipe) == pytest.approx(expected)


@pytest.mark.parametrize(("classes", "names"), [(3, {"top1"}), (9, {"top1"}), (10, {"top1", "top5"})])
def test_below_ten_classes_there_is_no_top5(tmp_path: Path, classes: int, names: set[str]) -> None:
    root = image_folder(tmp_path, classes)
    words = ["--data.source", "image_folder", "--data.root", str(root), "--data.size", "16"]
    recipe = tiny(*words, "--data.resize", "20")
    found = scores(random_model(recipe.build_task()), recipe)
    assert found.keys() == names


def test_scoring_changes_nothing_in_the_model() -> None:
    recipe = tiny("--model.arch-options.dropout", "0.5")
    model = random_model(recipe.build_task())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = scores(model.train(), recipe)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert scores(model, recipe) == first, "dropout is off in scoring"


def test_every_batch_is_told_and_a_stop_gives_no_scores() -> None:
    recipe = tiny("--val-batch", "4")
    model, told = random_model(recipe.build_task()), []
    evaluate(recipe.build_task(), model, recipe, ALONE, tick=told.append)
    assert told == ["0/3", "1/3", "2/3"]
    assert evaluate(recipe.build_task(), model, recipe, ALONE, stop=lambda: True) is None


def broken_folder(tmp_path: Path, bad: int) -> list[str]:
    root = image_folder(tmp_path / "images", classes=2)
    for file in sorted((root / "val").rglob("*.png"))[:bad]:
        file.write_bytes(b"no image")
    words = ["--data.source", "image_folder", "--data.root", str(root), "--data.size", "16"]
    return [*words, "--data.resize", "20", "--data.on-bad-image", "skip"]


def test_unreadable_images_are_counted_and_do_not_score(tmp_path: Path) -> None:
    recipe = tiny(*broken_folder(tmp_path, bad=3), "--val-batch", "1")
    found = evaluate(recipe.build_task(), random_model(recipe.build_task()), recipe, ALONE)
    assert found is not None
    assert found[0]["top1"] in (0.0, 100.0)
    assert found[1] == 3


def test_no_readable_image_at_all_is_an_error_and_no_score(tmp_path: Path) -> None:
    recipe = tiny(*broken_folder(tmp_path, bad=4))
    with pytest.raises(RunStoppedError, match="none of the 4 validation images can be read"):
        evaluate(recipe.build_task(), random_model(recipe.build_task()), recipe, ALONE)


# polynl evaluate


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(tiny("--channels-last", "true"), folder, SILENT)
    torch.save(load_file(folder / "last.safetensors"), folder / "state_dict.pth")
    return folder


@pytest.mark.parametrize(
    ("file", "row"),
    [
        ("last.pt", -1),
        ("last.safetensors", -1),
        ("state_dict.pth", -1),
        ("best.pt", "best"),
        ("best.safetensors", "best"),
    ],
)
def test_a_file_has_the_scores_that_training_noted(trained: Path, file: str, row: Any, capsys: Any) -> None:
    rows = json.loads((trained / "metrics.json").read_text())
    expected = max(rows, key=lambda row: row["top1"]) if row == "best" else rows[row]
    out = trained / "scores" / f"{file}.json"
    code, text, err = run(
        capsys, "evaluate", trained / "recipe.yaml", "--checkpoint", trained / file, "--out", out
    )
    assert (code, err) == (0, "")
    assert text.split() == ["top1", f"{expected['top1']:.3f}"]
    written = json.loads(out.read_text())
    assert written == {
        "checkpoint": str(trained / file),
        "top1": expected["top1"],
        "skipped": 0,
    }


def test_the_folder_of_a_run_is_enough(trained: Path, tmp_path: Path, capsys: Any) -> None:
    rows = json.loads((trained / "metrics.json").read_text())
    code, text, err = run(capsys, "evaluate", trained, "--val-batch", 3)
    assert (code, err) == (0, "")
    assert text.split() == ["top1", f"{max(row['top1'] for row in rows):.3f}"]
    code, text, _ = run(capsys, "evaluate", trained, "--checkpoint", trained / "last.pt")
    assert (code, text.split()) == (0, ["top1", f"{rows[-1]['top1']:.3f}"])
    (tmp_path / "recipe.yaml").write_bytes((trained / "recipe.yaml").read_bytes())
    code, _, err = run(capsys, "evaluate", tmp_path)
    assert (code, f"there is no checkpoint in the folder {tmp_path}." in err) == (2, True)


@pytest.mark.parametrize("file", ["last.pt", "last.safetensors"])
def test_a_checkpoint_of_a_run_is_enough(trained: Path, file: str, tmp_path: Path, capsys: Any) -> None:
    last = json.loads((trained / "metrics.json").read_text())[-1]
    code, text, err = run(capsys, "evaluate", trained / file)
    assert (code, err) == (0, "")
    assert text.split() == ["top1", f"{last['top1']:.3f}"]
    (tmp_path / file).write_bytes((trained / file).read_bytes())
    code, alone, err = run(capsys, "evaluate", tmp_path / file)
    if file == "last.safetensors":  # the recipe is in it
        assert (code, alone) == (0, text)
    else:
        assert code == 2
        assert f"there is no recipe.yaml next to {tmp_path / file}" in err


def test_what_is_no_run_is_told(trained: Path, tmp_path: Path, capsys: Any) -> None:
    code, _, err = run(capsys, "evaluate", "nothing")
    assert (code, err.splitlines()[0]) == (2, "polynl: there is no recipe nothing.")
    code, _, err = run(capsys, "evaluate", tmp_path)
    assert (code, err) == (2, f"polynl: {tmp_path} is a folder. There is no recipe in it.\n")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "recipe.yaml").write_bytes((trained / "recipe.yaml").read_bytes())
    for words in (
        ["evaluate", tmp_path],
        ["report", tmp_path],
        ["predict", tmp_path, "--checkpoint", tmp_path],
    ):
        Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
        code, _, err = run(capsys, *words)
        assert (code, f" Runs in it: {tmp_path / 'none'}." in err) == (2, True), words


def test_keys_of_the_recipe_can_be_given(trained: Path, capsys: Any) -> None:
    words = [
        "evaluate",
        trained / "recipe.yaml",
        "--data.val-images",
        "1",
        "--checkpoint",
        trained / "last.pt",
    ]
    code, text, _ = run(capsys, *words, "--threads", "1")
    assert code == 0
    assert text.split()[1] in ("0.000", "100.000")


def test_threads_are_set_for_scoring_too(trained: Path, capsys: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        words = ["evaluate", trained / "recipe.yaml", "--checkpoint", trained / "last.pt"]
        assert run(capsys, *words, "--threads", "1")[0] == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_skipped_images_are_told_and_written(tmp_path: Path, capsys: Any) -> None:
    words = broken_folder(tmp_path, bad=1)
    recipe = tiny(*words)
    torch.save(random_model(recipe.build_task()).state_dict(), tmp_path / "weights.pth")
    out = tmp_path / "scores.json"
    files = ["--checkpoint", tmp_path / "weights.pth", "--out", out]
    code, text, _ = run(capsys, "evaluate", TINY, *words, *files)
    assert code == 0
    assert "Skipped 1 unreadable image." in text
    assert json.loads(out.read_text())["skipped"] == 1


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """A folder of files that do not contain the network's weights."""
    folder = tmp_path_factory.mktemp("wrong")
    whole, safe = (trained / name for name in ("last.pt", "last.safetensors"))
    (folder / "cut.pt").write_bytes(whole.read_bytes()[:-1000])
    (folder / "cut.safetensors").write_bytes(safe.read_bytes()[:-1000])
    (folder / "cut early.safetensors").write_bytes(safe.read_bytes()[:20])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "empty.safetensors").write_bytes(b"")
    for suffix in ("pt", "safetensors", "txt"):
        (folder / f"text.{suffix}").write_text("these are no weights\n")
    (folder / "pt.safetensors").write_bytes(whole.read_bytes())
    torch.save(resnet("small_resnet", num_classes=6).state_dict(), folder / "wider.pth")
    torch.save(resnet("resnet18", num_classes=6).state_dict(), folder / "resnet18.pth")
    torch.save({"epoch": 3}, folder / "dict.pth")
    place = whole.read_bytes().index(load_file(safe)["fc.bias"].numpy().tobytes())
    content = bytearray(whole.read_bytes())
    content[place] ^= 1
    (folder / "changed.pt").write_bytes(content)
    (folder / "folder.pt").mkdir()
    return folder


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("cut.pt", "cut.pt' is damaged or not a file of tensors: "),
        ("cut.safetensors", "cut.safetensors' is damaged or not a file of tensors: "),
        ("cut early.safetensors", "cut early.safetensors' is damaged or not a file of tensors: "),
        ("empty.pt", "empty.pt' is damaged or not a file of tensors: "),
        ("empty.safetensors", "empty.safetensors' is damaged or not a file of tensors: "),
        ("text.pt", "text.pt' is not a file of tensors"),
        ("text.txt", "text.txt' is not a file of tensors"),
        ("text.safetensors", "text.safetensors' is damaged or not a file of tensors: "),
        ("pt.safetensors", "pt.safetensors' is damaged or not a file of tensors: "),
        ("changed.pt", "in it has changed"),
        ("wider.pth", "these shapes differ: bn1.bias is (32,), expected (8,)"),
        ("resnet18.pth", "does not fit the SmallResNet, missing: "),
        ("dict.pth", "dict.pth' must contain a state dict, tensors by name; got a dict of epoch"),
        ("nowhere.pt", "no such file: "),
        ("folder.pt", "no such file: "),
    ],
)
def test_a_wrong_file_is_told(trained: Path, wrong: Path, file: str, expected: str, capsys: Any) -> None:
    words = ["evaluate", trained / "recipe.yaml", "--checkpoint", wrong / file]
    code, out, err = run(capsys, *words, "--out", wrong / "scores.json")
    assert (code, out) == (2, "")
    assert err.startswith("polynl: --checkpoint: ")
    assert expected in err
    assert len(err.splitlines()) <= 4
    assert not (wrong / "scores.json").exists()


def test_scores_need_a_file(trained: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["evaluate", trained / "recipe.yaml", "--checkpoint", trained / "last.pt", "--out", tmp_path]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "is a folder; expected a file." in err


def test_a_checkpoint_must_be_named(capsys: Any) -> None:
    code, _, err = run(capsys, "evaluate", TINY)
    assert code == 2
    assert "--checkpoint" in err
    code, _, err = run(capsys, "evaluate", TINY, "--chekpoint", "x.pt")
    assert code == 2
    assert "--checkpoint" in err
