"""Recipes: those that come with polynl, files that build on others, and keys on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import run
from small_runs import TINY, image_folder, tiny
from torch import nn

from polynl import inserted
from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.cli import Evaluate, Train
from polynl.tasks.classification.config import ClassificationConfig
from polynl.tasks.registry import TASKS
from polynl.train import loop
from polynl.train.config import build_optimizer, list_keys, recipe_class
from polynl.train.recipe_file import (
    BUILT_IN,
    load_recipe,
    parse_recipe,
    read_yaml,
    to_yaml,
    write_yaml,
)

FOLDER = Path(__file__).parents[2] / "src" / "polynl" / "recipes"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
PAPER_BLOCKS = [NO_BLOCK, *(name for name, entry in BLOCKS.items() if entry.in_paper)]
with_each_block = pytest.mark.parametrize("block", PAPER_BLOCKS)


def imagenet(block: str, *overrides: str) -> Any:
    return load_recipe("imagenet", ["--model.block", block, *overrides])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return image_folder(tmp_path / "images", classes=2, images=1)


# The recipes that come with polynl


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_by_file_and_by_name(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    by_file = load_recipe(FOLDER / f"{name}.yaml")
    assert type(by_file) is recipe_class(by_file.task)
    # A folder of the same name is not in the way.
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for said in (name, f"{name}.yaml", f"recipes/{name}.yaml"):
        assert load_recipe(said) == by_file


@with_each_block
@pytest.mark.parametrize("name", ["imagenet", "folder", "scenes"])
def test_every_recipe_of_classes_has_a_network(name: str, block: str, images: Path) -> None:
    recipe = load_recipe(name, ["--model.block", block])
    assert isinstance(recipe, ClassificationConfig)
    if recipe.data.source == "image_folder":
        recipe = load_recipe(name, ["--model.block", block, "--data.root", str(images)])
    recipe.build_task().check()
    assert recipe.model.block == (None if block == "none" else block)


def test_every_recipe_stands_alone_and_has_poly_nl_unless_told_otherwise() -> None:
    assert BUILT_IN.resolve() == FOLDER.resolve()
    assert len(NAMES) >= 9
    assert len(list(FOLDER.rglob("*.*"))) == len(NAMES), "one file per recipe, and nothing else"
    for name in NAMES:
        content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        assert "base" not in content
        assert (content["model"]["block"], content["model"]["placement"]) == ("poly_nl", "res4")


def test_there_is_a_block_for_every_row_of_the_papers_tables() -> None:
    assert set(PAPER_BLOCKS) == {"none", "poly_nl", "non_local", "efficient_nl", "latent_gnn", "tesa"}


@with_each_block
def test_imagenet_recipes_say_the_papers_run(block: str) -> None:
    recipe = imagenet(block)
    assert isinstance(recipe, ClassificationConfig)
    assert recipe.model.block == (None if block == "none" else block)
    assert recipe.epochs == 90
    assert recipe.precision == "float32"
    assert (recipe.model.arch, recipe.model.arch_options) == ("resnet50", {})
    assert recipe.model.placement == "res4"
    assert recipe.model.options == {}
    assert recipe.model.zero_init_residual
    assert (recipe.model.weights, recipe.model.norm, recipe.model.stride_in_1x1) == (None, "batch", False)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.nesterov) == ("sgd", 0.9, False)
    assert (optimizer.weight_decay, optimizer.decay_norm_and_bias) == (1e-4, False)
    assert optimizer.clip_norm is None
    assert recipe.loss.label_smoothing == 0
    data = recipe.data
    assert data.source == "image_folder"
    assert (data.size, data.resize, data.scale, data.flip) == (224, 256, (0.08, 1.0), 0.5)
    assert (data.mean, data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@with_each_block
@pytest.mark.parametrize(("processes", "batch", "lr"), [(8, 256, 0.1), (4, 128, 0.05), (16, 512, 0.2)])
def test_imagenet_rates_scale_with_the_processes(block: str, processes: int, batch: int, lr: float) -> None:
    recipe = imagenet(block)
    assert recipe.total_batch(processes) == batch
    assert recipe.peak_lr(batch) == pytest.approx(lr, rel=1e-12)
    steps = 1_281_167 // batch
    rates = {
        epoch: recipe.peak_lr(batch) * recipe.schedule.factor(int(epoch * steps), steps, recipe.epochs)
        for epoch in (0, 2.5, 5, 29.99, 30, 59.99, 60, 79.99, 80, 89.99)
    }
    expected = [0, lr / 2, lr, lr, lr / 10, lr / 10, lr / 100, lr / 100, lr / 1000, lr / 1000]
    assert list(rates.values()) == pytest.approx(expected, rel=1e-3, abs=2 * lr / (5 * steps))


@with_each_block
def test_imagenet_networks_have_the_block_and_decay_only_matrices(block: str, images: Path) -> None:
    recipe = imagenet(block, "--data.root", str(images))
    assert isinstance(recipe, ClassificationConfig)
    with torch.device("meta"):
        model = recipe.build_task().model()
    expected = {} if block == "none" else {"layer3.5.polynl_before": BLOCKS[block].block}
    assert {name: type(found) for name, found in inserted(model).items()} == expected
    group_of = {
        id(parameter): group["weight_decay"]
        for group in build_optimizer(model, recipe.optimizer).param_groups
        for parameter in group["params"]
    }
    undecayed = {name for name, parameter in model.named_parameters() if group_of[id(parameter)] == 0}
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    norms = {name for name, module in model.named_modules() if isinstance(module, kinds)}
    assert {f"{norm}.{part}" for norm in norms for part in ("weight", "bias")} <= undecayed
    others = {name for name in undecayed if name.rpartition(".")[0] not in norms}
    assert {name.rpartition(".")[2] for name in others} <= {"bias", "alpha", "beta", "gamma"}
    if block == "poly_nl":
        assert {"layer3.5.polynl_before.alpha", "layer3.5.polynl_before.beta"} < others
    decayed = {name for name, _ in model.named_parameters()} - undecayed
    assert {group_of[id(model.get_parameter(name))] for name in decayed} == {1e-4}
    assert {"conv1.weight", "layer3.5.conv2.weight", "fc.weight"} <= decayed


def test_imagenet_residual_branches_begin_at_zero(images: Path) -> None:
    recipe = imagenet("none", "--data.root", str(images))
    model = recipe.build_task().model()
    scales = [module.bn3.weight for name, module in model.named_modules() if hasattr(module, "bn3")]
    assert len(scales) == 16
    assert not any(scale.any() for scale in scales)


# Files


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_written_out_is_the_same_recipe(name: str) -> None:
    recipe = load_recipe(name)
    assert parse_recipe(yaml.safe_load(to_yaml(recipe)), "written out") == recipe


def test_unusual_values_survive_being_written_out(tmp_path: Path) -> None:
    words = ["--model.options.form", "gram", "--model.placement", "[res3,res4]", "--optimizer.lr", "3e-7"]
    recipe = tiny(*words, "--model.weights", "gewichte ü #1: x.pt", "--model.arch_options.dropout", "1e-1")
    (tmp_path / "out.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    again = load_recipe(tmp_path / "out.yaml")
    assert again == recipe
    assert again.optimizer.lr == 3e-7
    assert str(again.model.weights) == "gewichte ü #1: x.pt"
    assert again.model.arch_options["dropout"] == 0.1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2E+3", -2000.0),
        (".5e1", 5.0),
        ("1.0e-4", 1e-4),
        ("1_000", 1000),
        ("'1e-4'", "1e-4"),
        ("1e", "1e"),
        ("e-4", "e-4"),
        ("res4", "res4"),
        ("null", None),
        ("[1, 2e0]", [1, 2.0]),
    ],
)
def test_numbers_of_yaml(text: str, value: object) -> None:
    read = read_yaml(text)
    assert (type(read), read) == (type(value), value)
    for flow in (False, True):
        assert read_yaml(write_yaml(value, flow=flow)) == value


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_bases_merge_deeply_and_what_is_nearer_wins(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path, ground=TINY.read_text() + "seed: 5\n")
    write(tmp_path / "below", middle="base: ../ground.yaml\noptimizer: {momentum: 0.5}\nbatch: 4\n")
    write(tmp_path / "below", top="base: middle.yaml\noptimizer: {nesterov: true}\nbatch: 2\n")
    # A base is looked for beside the file that names it, wherever the user stands.
    monkeypatch.chdir("/")
    recipe = load_recipe(tmp_path / "below" / "top.yaml")
    assert (recipe.seed, recipe.batch) == (5, 2)
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.momentum, optimizer.nesterov) == (0.05, 0.5, True)


def test_lists_are_replaced_and_empty_braces_take_options_away(tmp_path: Path) -> None:
    base = TINY.read_text().replace("name: constant", "milestones: [1, 2]")
    write(tmp_path, base=base, over="base: base.yaml\nschedule: {milestones: [1]}\nmodel: {arch_options: {}}")
    recipe = load_recipe(tmp_path / "over.yaml")
    assert recipe.schedule.milestones == (1,)
    assert recipe.model.arch_options == {}
    assert recipe.model.block == "poly_nl"


def test_another_source_of_data_takes_nothing_from_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(TINY.read_text())
    write(tmp_path, over="base: base.yaml\ndata: {source: image_folder, root: there}")
    by_file = load_recipe(tmp_path / "over.yaml")
    assert (by_file.data.source, by_file.data.size) == ("image_folder", 224)
    words = ["--data.root", "there", "--data.source", "image_folder"]
    assert tiny(*words).data == by_file.data
    assert tiny("--data.source", "scenes").data == tiny().data


# Keys on the command line


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--epochs 7", "epochs", 7),
        ("--epochs=7", "epochs", 7),
        ("--epochs 3 --epochs 7", "epochs", 7),
        ("--epochs 1e1", "epochs", 10),
        ("--optimizer.lr 0.2", "optimizer.lr", 0.2),
        ("--optimizer.lr 1e-4", "optimizer.lr", 1e-4),
        ("--optimizer.lr=1E-4", "optimizer.lr", 1e-4),
        ("--optimizer.weight-decay 0", "optimizer.weight_decay", 0.0),
        ("--evaluate-every 2", "evaluate_every", 2),
        ("--checkpoint_every 2", "checkpoint_every", 2),
        ("--optimizer.nesterov true", "optimizer.nesterov", True),
        ("--channels-last yes", "channels_last", True),
        ("--deterministic=false", "deterministic", False),
        ("--schedule.milestones [3,5]", "schedule.milestones", (3, 5)),
        ("--schedule.milestones []", "schedule.milestones", ()),
        ("--model.placement [res3,res4]", "model.placement", ["res3", "res4"]),
        ("--model.placement layer2.0", "model.placement", "layer2.0"),
        ("--model.block none", "model.block", None),
        ("--model.block null", "model.block", None),
        ("--model.options.form gram", "model.options", {"form": "gram"}),
        ("--model.options {form: gram}", "model.options", {"form": "gram"}),
        ("--model.arch-options.width 8", "model.arch_options", {"depth": 1, "width": 8}),
        ("--model.arch-options {}", "model.arch_options", {}),
        ("--model.weights a=b.pt", "model.weights", Path("a=b.pt")),
        ("--model.weights=a=b.pt", "model.weights", Path("a=b.pt")),
        ("--model.weights '3'", "model.weights", Path("3")),
        ("--batch null --batch-per-process 3", "batch_per_process", 3),
        ("--data.mean [-0.5,0,1]", "data.mean", (-0.5, 0.0, 1.0)),
        ("--threads null", "threads", None),
    ],
)
def test_keys_on_the_command_line(words: str, key: str, value: object) -> None:
    given = words.split(maxsplit=1) if "{" in words and "=" not in words else words.split()
    recipe = tiny(*given)
    for part in key.split("."):
        recipe = getattr(recipe, part)
    assert recipe == value
    assert type(recipe) is type(value) or isinstance(value, Path)


def test_only_what_is_given_changes() -> None:
    assert tiny() == tiny("--epochs", "2") != tiny("--epochs", "3")
    changed = tiny("--optimizer.lr", "0.5").model_dump()
    changed["optimizer"]["lr"] = 0.05
    assert changed == tiny().model_dump()


@pytest.mark.parametrize(
    "words",
    [
        ("--epochs", "3", "--out", "there", "--seed", "4"),
        ("--out", "there", "--seed", "4", "--epochs", "3"),
        ("--seed=4", "--epochs=3", "--out=there"),
        ("--resume", "--epochs", "3", "--out", "there", "--seed", "4"),
    ],
)
def test_options_and_keys_may_be_mixed(words: tuple[str, ...], capsys: Any, monkeypatch: Any) -> None:
    calls = []
    monkeypatch.setattr(loop, "train", lambda *given, **options: calls.append((given, options)))
    assert run(capsys, "train", TINY, *words) == (0, "", "")
    (((recipe, out, _), options),) = calls
    assert (recipe.epochs, recipe.seed, out) == (3, 4, Path("there"))
    assert options == {"resume": "--resume" in words, "overwrite": False}


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("scenes", "scenes/poly_nl-res4"),
        ("scenes --model.block none", "scenes/none"),
        ("recipes/coco.yaml --model.placement res345", "coco/poly_nl-res345"),
        ("recipes/coco.yaml --model.block tesa --model.placement [res3,res4]", "coco/tesa-res3+res4"),
        ("my.yaml", "my/poly_nl-res4"),
        ("lab/recipe.yaml", "lab/poly_nl-res4"),
        ("out/scenes/poly_nl-res4/recipe.yaml", "scenes/poly_nl-res4"),
        ("out/scenes/poly_nl-res4/recipe.yaml --model.block tesa", "scenes/tesa-res4"),
        ("out/scenes/none/recipe.yaml --seed 1", "scenes/poly_nl-res4"),
    ],
)
def test_the_default_folder_names_recipe_block_and_placement(
    words: str, folder: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(words.split()[0])
    if not path.is_relative_to("recipes") and path.suffix:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((FOLDER / "scenes.yaml").read_text())
    outs = []
    monkeypatch.setattr(loop, "train", lambda recipe, out, *_, **__: outs.append(out))
    assert run(capsys, "train", *words.split()) == (0, "", "")
    assert outs == [Path("runs", folder)]


@pytest.mark.parametrize("command", [Train, Evaluate])
def test_no_key_is_hidden_by_an_option_of_the_command(command: type) -> None:
    options = {field.name for field in dataclasses.fields(command)} - {"recipe", "keys"}
    for recipe in map(recipe_class, TASKS):
        assert not options & set(recipe.model_fields)


# --list-keys and --help


def test_list_keys_shows_every_key_its_value_and_its_meaning(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, "train", TINY, "--list-keys", "--epochs", "5")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    shown = {row[0].removeprefix("--"): row[1] for row in rows if row and row[0].startswith("--")}
    keys = {key: value for key, value, _ in list_keys(tiny("--epochs", "5"))}
    assert shown.keys() == keys.keys()
    assert (shown["epochs"], shown["model.block"], shown["optimizer.nesterov"]) == ("5", "poly_nl", "false")
    assert (shown["threads"], shown["optimizer.betas"]) == ("null", "[0.9,")


@pytest.mark.parametrize("name", NAMES)
def test_every_key_says_what_it_means(name: str) -> None:
    assert [key for key, _, field in list_keys(load_recipe(name)) if not field.description] == []


def test_what_list_keys_shows_can_be_given(tmp_path: Path) -> None:
    recipe = tiny("--epochs", "5", "--optimizer.betas", "[0.8,0.9]", "--schedule.milestones", "[1,2]")
    words = []
    for key, value, _ in list_keys(recipe):
        plain = list(value) if isinstance(value, tuple) else value
        words += [f"--{key}", write_yaml(plain, flow=True)]
    assert tiny(*words) == recipe


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("words", [("--help",), ("-h",), (TINY, "--help")])
def test_help_names_every_option(command: str, words: tuple[Any, ...], capsys: Any) -> None:
    code, out, err = run(capsys, command, *words)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: polynl {command}")
    options = {
        "train": ("--out", "--resume", "--overwrite", "--list-keys"),
        "evaluate": ("--checkpoint", "--out"),
    }
    assert all(option in out for option in options[command])
