"""What a fine-tuning asks for: images held out, colour jitter, mixup, a classifier that replaces itself."""

from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from polynl.errors import RunStoppedError, SettingsError
from polynl.models.resnet import resnet
from polynl.tasks.classification.config import ClassificationConfig
from polynl.tasks.classification.data import FolderImages, held_out, train_transform
from polynl.train.loading import SeededDataset
from polynl.train.loop import Trainer, train
from polynl.train.recipe_file import load_recipe

TINY = Path(__file__).parents[2] / "train" / "tiny.yaml"
CLASSES = ("cat", "dog")


def one_folder(root: Path, *, images: int = 10) -> Path:
    """<root>/<class>/*.png with random pixels, not split."""
    generator = torch.Generator().manual_seed(0)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for number in range(images):
            pixels = torch.randint(256, (20, 20, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(root / name / f"{number}.png")
    return root


def finetune(root: Path, *words: object) -> ClassificationConfig:
    """The recipe `finetune`, with a network and images small enough for a test."""
    options = {"depth": 1, "width": 4}
    small = ["--model.arch", "small_resnet", "--model.arch-options", str(options), "--epochs", "1"]
    small += ["--data.size", "16", "--data.resize", "16", "--batch", "6", "--data.root", str(root)]
    recipe = load_recipe("finetune", [*small, *map(str, words)])
    assert isinstance(recipe, ClassificationConfig)
    return recipe


def pretrained(path: Path, **keys: Any) -> Path:
    torch.save(resnet("small_resnet", arch_options={"depth": 1, "width": 4}, **keys).state_dict(), path)
    return path


def names(data: Any) -> set[str]:
    return {data.name(index) for index in range(len(data))}


# Images held out


def test_a_share_of_every_class_is_held_out(tmp_path: Path) -> None:
    root = one_folder(tmp_path)
    task = finetune(root, "--data.train", ".", "--data.held-out", "0.3").build_task()
    assert task.labels() == dict(enumerate(CLASSES))
    train_names, val_names = names(task.train_set()), names(task.val_set())
    assert train_names | val_names == {f"{name}/{number}.png" for name in CLASSES for number in range(10)}
    assert not train_names & val_names
    assert Counter(name.partition("/")[0] for name in val_names) == {"cat": 3, "dog": 3}


def test_new_images_move_few_of_the_others() -> None:
    before = [(f"cat/{number}.jpg", 0) for number in range(100)]
    after = [(f"cat/{number}.jpg", 0) for number in range(-10, 100)]
    held = dict(zip(before, held_out(before, 0.2), strict=True))
    later = dict(zip(after, held_out(after, 0.2), strict=True))
    assert sum(held.values()) == 20
    assert sum(held[sample] != later[sample] for sample in before) <= 5
    assert list(held.values()) != [True] * 20 + [False] * 80, "the first files may be alike"


def test_the_only_image_of_a_class_is_trained_on(tmp_path: Path, capsys: Any) -> None:
    assert held_out([("a/1", 0), ("b/1", 1), ("b/2", 1)], 0.01)[0] is False
    root = one_folder(tmp_path / "images", images=1)
    words = ["train", "folder", "--data.root", root, "--data.train", ".", "--data.held-out", "0.5"]
    code, _, err = run(capsys, *words, "--batch", 2, "--out", tmp_path / "run")
    assert (code, "data.held_out: no image can be held out" in err) == (2, True)


def test_a_folder_without_splits_says_how_to_use_it(tmp_path: Path, capsys: Any) -> None:
    code, _, err = run(capsys, "train", "folder", "--data.root", one_folder(tmp_path / "images"))
    assert code == 2
    assert "(. is <root> itself), and hold out a share of its images with --data.held-out 0.2." in err


# Colours


def jittered(root: Path, jitter: float) -> FolderImages:
    return FolderImages(root, train_transform(16, (1, 1), 0.0, jitter=jitter), on_bad_image="stop")


def test_colours_change_by_epoch_and_image_alone(tmp_path: Path) -> None:
    root = one_folder(tmp_path, images=2)
    plain, coloured = (SeededDataset(jittered(root, jitter), seed=3) for jitter in (0.0, 0.4))
    assert not torch.equal(plain[0, 1][0], coloured[0, 1][0])
    assert not torch.equal(coloured[0, 1][0], coloured[1, 1][0])
    torch.manual_seed(5)
    again = coloured[0, 1][0]
    assert torch.equal(again, coloured[0, 1][0])
    assert again.dtype == torch.uint8


def test_a_recipe_reaches_the_transforms(tmp_path: Path) -> None:
    one_folder(tmp_path / "train")
    words = ["--data.colour-jitter", "0.4", "--data.interpolation", "bicubic"]
    data = finetune(tmp_path, *words).data
    shown = str(data.load("train")._transform)
    assert "ColorJitter(brightness=(0.6, 1.4), contrast=(0.6, 1.4), saturation=(0.6, 1.4)" in shown
    assert (
        str(data.view()).count("InterpolationMode.BICUBIC") == shown.count("InterpolationMode.BICUBIC") == 1
    )


# Mixup


def mixed(alpha: float) -> ClassificationConfig:
    recipe = load_recipe(TINY, ["--loss.mixup", str(alpha), "--loss.label-smoothing", "0.1"])
    assert isinstance(recipe, ClassificationConfig)
    return recipe


def test_mixup_by_hand() -> None:
    task = mixed(0.4).build_task()
    torch.manual_seed(0)
    model = task.model().eval()
    data = task.train_set()
    batch = task.collate([data[index] for index in range(5)], training=True)
    torch.manual_seed(1)
    (loss,) = task.losses(model, batch).values()
    torch.manual_seed(1)
    share = torch.distributions.Beta(0.4, 0.4).sample().item()
    assert 0.001 < share < 0.999
    expected = 0.0
    for place in range(5):
        pair = (place, (place - 1) % 5)
        one, other = (task.inputs(batch.images[index]).double() for index in pair)
        with torch.no_grad():
            (logits,) = model((share * one + (1 - share) * other).float()).double()
        logs = logits.log_softmax(0).tolist()
        for weight, index in zip((share, 1 - share), pair, strict=True):
            label = int(batch.targets[index])
            expected -= weight * (0.9 * logs[label] + 0.1 * sum(logs) / len(logs))
    assert loss.item() == pytest.approx(expected / 5, rel=1e-5)


def test_a_stopped_run_with_mixup_ends_as_if_it_had_not_been(tmp_path: Path, monkeypatch: Any) -> None:
    recipe, silent = mixed(0.4), Console(quiet=True)
    train(recipe, tmp_path / "whole", silent)
    step, done = Trainer._train_step, 0

    def stop_at_fourth(trainer: Any, batch: Any) -> Any:
        nonlocal done
        done += 1
        if done == 4:
            trainer._save()
            raise RunStoppedError("here")
        return step(trainer, batch)

    monkeypatch.setattr(Trainer, "_train_step", stop_at_fourth)
    with pytest.raises(RunStoppedError, match="here"):
        train(recipe, tmp_path / "stopped", silent)
    monkeypatch.setattr(Trainer, "_train_step", step)
    torch.manual_seed(99)
    train(recipe, tmp_path / "stopped", silent, resume=True)
    whole, stopped = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[key], stopped[key]) for key in whole)


@pytest.mark.parametrize("mixup", [-1.0, math.nan])
def test_mixup_must_not_be_negative(mixup: float) -> None:
    with pytest.raises(ValueError, match=r"loss.mixup: expected"):
        mixed(mixup)


# Pretrained weights


def said(recipe: ClassificationConfig, folder: Path) -> str:
    text = io.StringIO()
    train(recipe, folder, Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.parametrize("classes", [2, 1000])
def test_finetune_trains_a_new_classifier_where_classes_differ(tmp_path: Path, classes: int) -> None:
    root = one_folder(tmp_path / "images")
    weights = pretrained(tmp_path / "weights.pt", num_classes=classes)
    words = [
        "--data.train",
        ".",
        "--data.held-out",
        "0.2",
        "--model.weights",
        weights,
        "--model.block",
        "none",
    ]
    text = said(finetune(root, *words, "--keep-checkpoints", "last"), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == ["last.pt"]
    note = f"{weights} has fc for other classes: a new one for 2 classes is trained."
    assert (note in text) == (classes == 1000)
    assert "Every epoch trains on 12 of 16 images: 4, others each time, do not fill a batch of 6." in text
    trained: dict[str, Tensor] = load_file(tmp_path / "run" / "best.safetensors")
    assert trained["fc.weight"].shape == (2, 32)
    given = torch.load(weights, weights_only=True)
    assert torch.equal(trained["conv1.weight"], given["conv1.weight"]), "the first stages are kept"
    assert not torch.equal(trained["layer3.0.conv1.weight"], given["layer3.0.conv1.weight"])


def test_other_weights_name_the_key(tmp_path: Path, capsys: Any) -> None:
    root = one_folder(tmp_path / "images")
    state = resnet("small_resnet", arch_options={"depth": 1, "width": 4}).state_dict()
    torch.save({key: value for key, value in state.items() if not key.startswith("fc.")}, tmp_path / "w.pt")
    words = [
        "--model.arch",
        "small_resnet",
        "--model.arch-options",
        "{depth: 1, width: 4}",
        "--data.train",
        ".",
    ]
    words += ["--data.held-out", "0.2", "--data.root", root, "--model.weights", tmp_path / "w.pt"]
    code, _, err = run(capsys, "train", "finetune", *words, "--out", tmp_path / "run")
    assert code == 2
    assert "model.weights: " in err
    assert "To train a new classifier, set weights_without to [fc]" in err


def test_classes_are_named_by_a_file(tmp_path: Path) -> None:
    root, file = one_folder(tmp_path / "images", images=2), tmp_path / "labels.txt"
    keys = ["--data.train", ".", "--data.held-out", 0.5, "--data.labels", file, "--model.weights", "null"]
    file.write_text("Felis catus\nCanis familiaris\n")
    task = finetune(root, *keys).build_task()
    task.check()
    assert task.labels() == {0: "Felis catus", 1: "Canis familiaris"}
    file.write_text("Felis catus\n")
    with pytest.raises(SettingsError, match=r"data.labels: .*labels.txt names 1 classes; .* has 2 folders"):
        task.check()
    by_number = file.with_suffix(".json")
    keys[keys.index(file)] = by_number
    by_number.write_text('{"1": "Canis familiaris", "0": "Felis catus"}')
    assert finetune(root, *keys).build_task().labels() == {0: "Felis catus", 1: "Canis familiaris"}
    by_number.write_text('{"1": "Felis catus", "2": "Canis familiaris"}')
    with pytest.raises(SettingsError, match=r"data.labels: .*labels.json has no name for class 0; "):
        finetune(root, *keys).build_task().check()
    file.unlink()
    task.check(training=False)
    with pytest.raises(SettingsError, match=r"data.labels: .*labels.txt cannot be read"):
        task.check()
