"""The recipes for COCO and for scenes with instances match the paper's run and can be built."""

from __future__ import annotations

import pytest
import torch

from polynl import inserted
from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.tasks.instance_segmentation.config import InstanceSegmentationConfig
from polynl.train.config import build_optimizer
from polynl.train.recipe_file import load_recipe, parse_recipe, read_yaml, to_yaml

PAPER_BLOCKS = [NO_BLOCK, *(name for name, entry in BLOCKS.items() if entry.in_paper)]
PLACES = {
    "res3": ["layer2.3"],
    "res4": ["layer3.5"],
    "res5": ["layer4.2"],
    "res345": ["layer2.3", "layer3.5", "layer4.2"],
}
# The rows of the paper's table, and its ablation of placements.
ROWS = [(block, "res4") for block in PAPER_BLOCKS] + [
    ("poly_nl", place) for place in ("res3", "res5", "res345")
]
with_each_row = pytest.mark.parametrize(("block", "placement"), ROWS)
CATEGORIES = {1: "person", 90: "toothbrush"}


def load(name: str, block: str, placement: str = "res4") -> InstanceSegmentationConfig:
    recipe = load_recipe(name, ["--model.block", block, "--model.placement", placement])
    assert isinstance(recipe, InstanceSegmentationConfig)
    return recipe


def test_the_paper_has_nine_rows() -> None:
    assert len(set(ROWS)) == 9


@with_each_row
def test_coco_recipes_say_the_papers_run(block: str, placement: str) -> None:
    recipe = load("coco", block, placement)
    assert (recipe.epochs, recipe.total_batch(8)) == (26, 16)
    optimizer, model, data = recipe.optimizer, recipe.model, recipe.data
    assert (optimizer.name, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 1e-4)
    assert optimizer.decay_norm_and_bias
    assert optimizer.clip_norm is None
    assert (model.arch, model.norm, model.trainable_stages) == ("resnet50", "frozen", 3)
    assert (model.min_size, model.max_size, model.detector_options) == (800, 1333, {})
    assert (model.anchor_sizes, model.roi_scale) == ((32, 64, 128, 256, 512), 224)
    assert (model.fpn_channels, model.box_width, model.mask_widths) == (256, 1024, (256, 256, 256, 256))
    assert data.source == "coco"
    assert (data.flip, data.group_by_aspect, data.categories) == (0.5, True, None)


@pytest.mark.parametrize(("processes", "batch", "lr"), [(8, 16, 0.02), (4, 8, 0.01), (1, 2, 0.0025)])
def test_coco_rates(processes: int, batch: int, lr: float) -> None:
    recipe = load("coco", "poly_nl")
    assert recipe.total_batch(processes) == batch
    # COCO's training images with an annotation.
    steps = 117_266 // batch
    rates = [
        recipe.peak_lr(batch) * recipe.schedule.factor(int(epoch * steps), steps, recipe.epochs)
        for epoch in (0, 0.14, 1, 15.99, 16, 21.99, 22, 25.99)
    ]
    expected = [lr / 1000, lr, lr, lr, lr / 10, lr / 10, lr / 100, lr / 100]
    assert rates == pytest.approx(expected, rel=0.35, abs=lr / 900)
    assert rates[1:] == pytest.approx(expected[1:], rel=1e-6)


@with_each_row
def test_coco_detectors_have_the_block_in_its_place(block: str, placement: str) -> None:
    recipe = load("coco", block, placement)
    # On no device: the sizes of the paper, without their memory.
    with torch.device("meta"):
        model = recipe.without_weights().build_task(CATEGORIES).model()
    places = [] if block == "none" else PLACES[placement]
    assert {where: type(found) for where, found in inserted(model).items()} == {
        f"backbone.body.{place}.polynl_before": BLOCKS[block].block for place in places
    }
    decays = {group["weight_decay"] for group in build_optimizer(model, recipe.optimizer).param_groups[:1]}
    assert decays == {1e-4}


@pytest.mark.parametrize("block", PAPER_BLOCKS)
@pytest.mark.parametrize("name", ["coco_small", "scenes_instances"])
def test_miniatures_have_the_block(name: str, block: str) -> None:
    recipe = load(name, block).without_weights()
    model = recipe.build_task(CATEGORIES).model()
    assert [type(found) for found in inserted(model).values()] == (
        [] if block == "none" else [BLOCKS[block].block]
    )


@pytest.mark.parametrize("name", ["coco", "wider_face"])
def test_new_runs_ignore_padding_and_older_ones_do_as_they_were_trained(name: str) -> None:
    recipe = load_recipe(name)
    written = read_yaml(to_yaml(recipe))
    assert written["model"]["ignore_padding"] is True
    assert parse_recipe(written, "recipe.yaml") == recipe
    del written["model"]["ignore_padding"]
    assert parse_recipe(written, "recipe.yaml").model.ignore_padding is False
    assert load_recipe(name, ["--model.ignore-padding", "false"]).model.ignore_padding is False
