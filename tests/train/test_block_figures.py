"""What is logged about blocks after every epoch, against the formula, and what is said about idle ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import SILENT, tiny

from polynl.blocks.base import Block
from polynl.results.block_figures import block_columns, idle_blocks, idle_sentence
from polynl.train.block_figures import BlockWatch
from polynl.train.loop import train

CPU = torch.device("cpu")


def watched(*overrides: str) -> tuple[BlockWatch, Any, Any]:
    recipe = tiny(*overrides)
    task = recipe.build_task()
    torch.manual_seed(0)
    model = task.model()
    return BlockWatch(task, model, recipe, CPU), model, task


def only_block(model: torch.nn.Module) -> Any:
    (block,) = (module for module in model.modules() if isinstance(module, Block))
    return block


def test_a_new_block_has_no_share() -> None:
    figures = watched()[0].figures()
    assert figures == {"layer3.0.alpha": 1.0, "layer3.0.beta": 0.0, "layer3.0.share": 0.0}


def test_the_share_is_that_of_the_formula() -> None:
    watch, model, task = watched("--model.block", "poly_nl")
    block = only_block(model)
    with torch.no_grad():
        block.alpha.fill_(0.7)
        block.beta.fill_(0.4)
    figures = watch.figures()
    data = task.val_set()
    count = min(16, len(data))
    images = torch.stack([data[number * len(data) // count][0] for number in range(count)])
    seen: list[torch.Tensor] = []
    handle = block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        task.logits(model.eval(), images)
        handle.remove()
        x = seen[0].double().flatten(2).mT
        w1, w2, w3 = (layer.weight.double().mT for layer in (block.w1, block.w2, block.w3))
        y = (((x @ w1) * (x @ w2)).mean(1, keepdim=True) * x) @ w3
        share = (0.4 * y).norm() / (0.7 * x + 0.4 * y).norm()
    assert figures["layer3.0.alpha"] == pytest.approx(0.7)
    assert figures["layer3.0.beta"] == pytest.approx(0.4)
    assert 0.001 < figures["layer3.0.share"] == pytest.approx(share.item(), rel=1e-4)


def test_as_many_images_are_measured_however_small_the_batches() -> None:
    figures = [watched("--val-batch", size, "--model.options.init", "random")[0].figures() for size in "17"]
    for name in ("alpha", "beta", "share"):
        assert figures[0][f"layer3.0.{name}"] == pytest.approx(figures[1][f"layer3.0.{name}"], rel=1e-5)


def test_what_bfloat16_rounds_is_no_branch() -> None:
    watch, model, _ = watched("--precision", "bfloat16")
    with torch.no_grad():
        only_block(model).alpha.fill_(0.9)
    assert watch.figures()["layer3.0.share"] < 1e-6


@pytest.mark.parametrize("block", ["non_local", "tesa", "efficient_nl", "conv"])
def test_blocks_without_learned_scales_have_a_share_alone(block: str) -> None:
    figures = watched("--model.block", block, "--model.options.init", "random")[0].figures()
    assert list(figures) == ["layer3.0.share"]
    assert 0 < figures["layer3.0.share"] < 10


def test_every_block_of_a_network_is_measured_and_none_stays_hooked() -> None:
    watch, model, _ = watched("--model.placement", "[layer2.0, layer3.0]", "--model.options.init", "random")
    assert {name.rpartition(".")[0] for name in watch.figures()} == {"layer2.0", "layer3.0"}
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, Block))


def test_a_network_without_a_block_has_no_figures() -> None:
    assert watched("--model.block", "none")[0].figures() == {}


def test_every_epoch_has_the_figures_in_the_metrics_and_in_tensorboard(tmp_path: Path) -> None:
    rows = train(tiny("--optimizer.block-lr-scale", "3"), tmp_path / "run", SILENT)
    assert [set(row) >= {"layer3.0.alpha", "layer3.0.beta", "layer3.0.share"} for row in rows] == [
        True
    ] * len(rows)
    assert rows[-1]["layer3.0.share"] > 0
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == rows
    assert "layer3.0.share" in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")


@pytest.mark.parametrize(("lr", "idle"), [("1e-9", True), ("0.1", False)])
def test_the_summary_points_out_a_block_that_does_nothing(lr: str, idle: bool, tmp_path: Path) -> None:
    console = Console(record=True, width=400)
    train(tiny("--optimizer.lr", lr, "--optimizer.name", "adamw"), tmp_path / "run", console)
    said = console.export_text()
    assert ("The block at layer3.0 hardly does anything" in said) == idle


def test_a_block_is_idle_only_if_it_always_was() -> None:
    nan = float("nan")
    rows = [{"a.share": nan, "b.share": 0.2}, {"a.share": 9e-4, "b.share": 5e-5}, {"b.share": nan}]
    assert block_columns(rows, "share") == {"a": "a.share", "b": "b.share"}
    assert idle_blocks(rows) == {"a": 9e-4}
    assert "block at a " in idle_sentence("a", 9e-4)
    assert "0.0009" in idle_sentence("a", 9e-4)
