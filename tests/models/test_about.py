"""Files of weights tell of their network what shapes do not, and do not load into another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from polynl.blocks import ConvBaseline
from polynl.blocks.base import options_of
from polynl.blocks.registry import BLOCKS, build_block
from polynl.models.about import ENTRY, FORMAT, NEUTRAL_OPTIONS, About, about_file, structure_of
from polynl.models.faster_rcnn import faster_rcnn
from polynl.models.resnet import ClassifierConfig, resnet
from polynl.models.weights import MisfitError, load_weights

SMALL = {"arch_options": {"width": 4, "depth": 1}, "num_classes": 3}


def saved(model: nn.Module, path: Path, **about: Any) -> Path:
    """A file as a run writes it."""
    text = About(structure_of(model), **about).to_json()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, path, {ENTRY: text})
    return path


@pytest.fixture(scope="module")
def strided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet-50 that downsamples in its 1×1 convolutions, of 3 classes."""
    torch.manual_seed(0)
    recipe = {"model": {"arch": "resnet50", "stride_in_1x1": True, "block": None, "placement": "res4"}}
    model = resnet("resnet50", num_classes=3, stride_in_1x1=True)
    return saved(model, tmp_path_factory.mktemp("weights") / "best.safetensors", recipe=recipe)


def test_a_forgotten_stride_does_not_load(strided: Path) -> None:
    model = resnet("resnet50", num_classes=3)
    before = model.conv1.weight.clone()
    with pytest.raises(MisfitError) as caught:
        load_weights(model, strided)
    said = str(caught.value)
    assert "though all shapes agree: layer2.0.conv1.stride is [1, 1] (in the file [2, 2])" in said
    assert said.endswith("It was trained with arch resnet50, stride_in_1x1 true")
    assert "\n" not in said
    assert torch.equal(model.conv1.weight, before)


def test_the_right_network_loads(strided: Path) -> None:
    model = resnet("resnet50", num_classes=3, stride_in_1x1=True)
    load_weights(model, strided)
    assert torch.equal(model.fc.weight, load_file(strided)["fc.weight"])


def test_a_file_without_a_description_loads_as_before(strided: Path, tmp_path: Path) -> None:
    save_file(load_file(strided), tmp_path / "plain.safetensors")
    model = resnet("resnet50", num_classes=3)
    load_weights(model, tmp_path / "plain.safetensors")
    assert torch.equal(model.fc.weight, load_file(strided)["fc.weight"])


def test_a_recipe_that_starts_from_such_weights_needs_the_stride_too(strided: Path) -> None:
    with pytest.raises(ValueError, match=r"layer2\.0\.conv1\.stride") as caught:
        ClassifierConfig(arch="resnet50", weights=strided).check(3)
    assert "weights_without" not in str(caught.value)
    with pytest.raises(ValueError, match=r"backbone_weights: .*layer2\.0\.conv1\.stride"):
        faster_rcnn(backbone_weights=strided, num_classes=2)


def test_other_classes_and_frozen_norms_are_no_difference(strided: Path) -> None:
    config = ClassifierConfig(arch="resnet50", weights=strided, stride_in_1x1=True, norm="frozen")
    assert config.check(7) == ["fc"]


@pytest.mark.parametrize("name", BLOCKS)
def test_every_option_of_a_block_that_changes_values_is_recorded(name: str) -> None:
    entry = structure_of(nn.Sequential(build_block(name, 8))).get("0", {})
    assert set(entry) == set(options_of(BLOCKS[name].block)) - {*NEUTRAL_OPTIONS, "device", "dtype"}
    assert json.loads(json.dumps(entry)) == entry


def with_block(name: str, **options: Any) -> nn.Module:
    return resnet("small_resnet", block=name, options={"init": "random", **options}, **SMALL)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("poly_nl", {"window": 3}),
        ("non_local", {"scale": "inner"}),
        ("efficient_nl", {"heads": 2}),
        ("tesa", {"normalization": "none"}),
        ("conv", {"residual": True}),
    ],
)
def test_an_option_of_a_block_that_no_shape_tells(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    file = saved(with_block(name, **options), tmp_path / "w.safetensors")
    load_weights(with_block(name, **options), file)
    (option,) = options
    with pytest.raises(MisfitError, match=rf"polynl_before\.{option} is .* \(in the file "):
        load_weights(with_block(name), file)


@pytest.mark.parametrize(("name", "option"), [("poly_nl", "form"), ("tesa", "order")])
def test_how_a_block_computes_its_values_is_no_difference(name: str, option: str, tmp_path: Path) -> None:
    other = {"form": "direct", "order": "quadratic"}[option]
    load_weights(with_block(name), saved(with_block(name, **{option: other}), tmp_path / "w.safetensors"))


def test_anchors_are_compared(tmp_path: Path) -> None:
    """Their sizes are in no weight, and a detector that looks for others finds nothing."""

    def detector(size: int) -> nn.Module:
        sizes = (size, 2 * size, 4 * size)
        return faster_rcnn(
            "small_resnet",
            num_classes=2,
            anchor_sizes=sizes,
            fpn_channels=8,
            box_width=8,
            arch_options={"width": 4},
        )

    file = saved(detector(8), tmp_path / "w.safetensors")
    load_weights(detector(8), file, trained=True)
    with pytest.raises(MisfitError, match=r"rpn\.anchor_generator\.sizes is \[\[16"):
        load_weights(detector(16), file, trained=True)


def test_modules_of_others_are_compared_by_what_changes_their_output(tmp_path: Path) -> None:
    def network(heads: int, activation: nn.Module, dropout: float) -> nn.Module:
        return nn.ModuleDict(
            {"attend": nn.MultiheadAttention(8, heads), "act": activation, "drop": nn.Dropout(dropout)}
        )

    file = saved(network(2, nn.ReLU(), 0.1), tmp_path / "w.safetensors")
    load_weights(network(2, nn.ReLU(), 0.5), file)
    with pytest.raises(MisfitError, match=r"attend\.num_heads is 4 \(in the file 2\)"):
        load_weights(network(4, nn.ReLU(), 0.1), file)
    with pytest.raises(MisfitError, match=r"act\.activation is GELU \(in the file ReLU\)"):
        load_weights(network(2, nn.GELU(), 0.1), file)


def test_modules_that_are_not_loaded_are_not_compared(tmp_path: Path) -> None:
    def network(stride: int) -> nn.Module:
        return nn.ModuleDict({"body": nn.Conv2d(1, 2, 3), "head": nn.Conv2d(2, 2, 3, stride)})

    file, model = saved(network(1), tmp_path / "w.safetensors"), network(2)
    with pytest.raises(MisfitError, match=r"head\.stride is \[2, 2\]"):
        load_weights(model, file)
    load_weights(model, file, without=["head"])
    assert torch.equal(model["body"].weight, load_file(file)["body.weight"])


class Secretive(ConvBaseline):
    """A block that does not store its option: it cannot be described, and is not compared."""

    def __init__(self, channels: int, *, secret: int = 1) -> None:
        super().__init__(channels)


def test_a_block_that_cannot_be_described_is_left_out() -> None:
    assert "0" not in structure_of(nn.Sequential(Secretive(4)))


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = nn.Conv2d(1, 1, 1)
    file = saved(
        model,
        tmp_path / "w.safetensors",
        labels={0: "Käfer"},
        scores={"top1": 1 / 3},
        epoch=4,
        recipe={"task": "x"},
    )
    about = about_file(file)
    assert about == About(structure_of(model), {"task": "x"}, {0: "Käfer"}, {"top1": 1 / 3}, 4)
    assert set(load_file(file)) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ('{"format": "polynl weights 9"}', "this version reads 'polynl weights 1'"),
        (json.dumps({"format": FORMAT, "labels": {}, "structure": {}}), "it has no 'recipe'"),
        (json.dumps({"format": FORMAT, "labels": {}, "structure": 3}), "its structure is 3"),
        (json.dumps({"format": FORMAT, "labels": {"a": "b"}}), "invalid literal"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_description_that_cannot_be_read(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), file, {ENTRY: text})
    for read in (about_file, lambda path: load_weights(model, path)):
        with pytest.raises(ValueError, match=r"w\.safetensors' has an unreadable description") as caught:
            read(file)
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)
