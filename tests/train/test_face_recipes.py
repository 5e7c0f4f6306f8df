"""The recipes for WIDER FACE and for drawn faces match the paper's run and can be built."""

from __future__ import annotations

import pytest
import torch

from polynl import inserted
from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.tasks.face_detection.config import FaceDetectionConfig
from polynl.train.recipe_file import load_recipe

with_each_block = pytest.mark.parametrize(
    "block", [NO_BLOCK, *(name for name, entry in BLOCKS.items() if entry.in_paper)]
)


def load(name: str, block: str) -> FaceDetectionConfig:
    recipe = load_recipe(name, ["--model.block", block])
    assert isinstance(recipe, FaceDetectionConfig)
    return recipe


@with_each_block
def test_wider_face_recipes_say_the_papers_run(block: str) -> None:
    recipe = load("wider_face", block)
    optimizer, model, data = recipe.optimizer, recipe.model, recipe.data
    assert (recipe.epochs, recipe.total_batch(8), recipe.peak_lr(64)) == (400, 64, 0.001)
    assert (optimizer.name, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 5e-4)
    assert (model.arch, model.norm, model.weights, model.backbone_weights) == (
        "resnet50",
        "batch",
        None,
        None,
    )
    assert (model.positive_iou, model.negative_iou, model.levels) == (0.35, 0.35, (2, 3, 4, 5, 6))
    assert (model.min_size, model.max_size) == (1100, 1650)
    assert model.detector_options == {
        "score_thresh": 0.02,
        "nms_thresh": 0.4,
        "topk_candidates": 5000,
        "detections_per_img": 750,
    }
    assert data.source == "wider_face"
    assert (data.flip, data.truth_scale) == (0.5, 1.0)
    assert (data.patch.size, data.patch.scale, data.patch.distort) == (640, (0.3, 1.0), 0.5)
    # On no device: the sizes of the paper, without their memory.
    with torch.device("meta"):
        network = recipe.build_task().model()
    expected = {} if block == "none" else {"backbone.body.layer3.5.polynl_before": BLOCKS[block].block}
    assert {name: type(found) for name, found in inserted(network).items()} == expected
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_wider_face_rates() -> None:
    recipe = load("wider_face", "poly_nl")
    steps = 12_880 // 64
    epochs = (0, 1.5, 3, 249.99, 250, 349.99, 350, 399.99)
    rates = [1e-3 * recipe.schedule.factor(int(epoch * steps), steps, recipe.epochs) for epoch in epochs]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5], rel=0.01, abs=5e-6)


@with_each_block
@pytest.mark.parametrize("name", ["faces_small", "scenes_faces"])
def test_miniatures_have_the_block(name: str, block: str) -> None:
    network = load(name, block).without_weights().build_task().model()
    assert [type(found) for found in inserted(network).values()] == (
        [] if block == "none" else [BLOCKS[block].block]
    )
