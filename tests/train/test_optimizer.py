"""Which parameters decay, and the steps of each optimizer against its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SILENT, tiny
from torch import Tensor, nn

from polynl.models.resnet import resnet
from polynl.train.checkpoint import load_checkpoint, save_checkpoint
from polynl.train.config import OptimizerConfig, build_optimizer
from polynl.train.loop import train


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return resnet("small_resnet", block="poly_nl", arch_options={"width": 4}, num_classes=3)


def decay_by_name(model: nn.Module, part: OptimizerConfig) -> dict[str, float]:
    groups = build_optimizer(model, part).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(decay)
    return {name: decay[id(p)] for name, p in model.named_parameters() if id(p) in decay}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_norms_biases_alpha_and_beta_do_not_decay(name: str, model: nn.Module) -> None:
    found = decay_by_name(model, OptimizerConfig(name=name, weight_decay=0.3))
    assert found.keys() == dict(model.named_parameters()).keys()
    free = {key for key, decay in found.items() if decay == 0}
    assert {"bn1.weight", "bn1.bias", "fc.bias", "layer1.0.downsample.1.weight"} < free
    assert {"layer3.0.polynl_before.alpha", "layer3.0.polynl_before.beta"} < free
    assert all(found[key] == 0.3 for key in ("conv1.weight", "fc.weight", "layer3.0.polynl_before.w1.weight"))
    assert all((model.get_parameter(key).ndim < 2) == (key in free) for key in found)


def test_everything_decays_where_the_recipe_says_so(model: nn.Module) -> None:
    found = decay_by_name(model, OptimizerConfig(weight_decay=0.3, decay_norm_and_bias=True))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert set(found.values()) == {0.3}


def test_what_is_frozen_is_left_out(model: nn.Module) -> None:
    model.fc.requires_grad_(False)
    found = decay_by_name(model, OptimizerConfig())
    assert dict(model.named_parameters()).keys() - found.keys() == {"fc.weight", "fc.bias"}


def test_blocks_have_a_learning_rate_of_their_own(model: nn.Module) -> None:
    groups = build_optimizer(model, OptimizerConfig(block_lr_scale=5)).param_groups
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert scale[id(parameter)] == (5 if "polynl_before" in name else 1), name


def test_a_step_moves_a_block_by_its_own_rate(tmp_path: Path) -> None:
    moved = {}
    for scale in ("1", "4"):
        keys = ("--epochs", "1", "--optimizer.name", "sgd", "--optimizer.momentum", "0")
        train(tiny(*keys, "--optimizer.block-lr-scale", scale, "--batch", "16"), tmp_path / scale, SILENT)
        moved[scale] = load_checkpoint(tmp_path / scale / "last.pt")["model"]["layer3.0.polynl_before.beta"]
    assert moved["1"].abs() > 0
    torch.testing.assert_close(moved["4"], 4 * moved["1"], rtol=1e-4, atol=0.0)


GRADIENTS = [torch.tensor([[0.3, -0.2], [0.1, 0.7]]), torch.tensor([[-0.6, 0.4], [0.2, 0.1]])]


def sgd(w: Tensor, decay: float, *, nesterov: bool) -> Tensor:
    velocity = torch.zeros_like(w)
    for gradient in GRADIENTS:
        d = gradient + decay * w
        velocity = 0.8 * velocity + d
        w = w - 0.1 * (d + 0.8 * velocity if nesterov else velocity)
    return w


def adamw(w: Tensor, decay: float) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, gradient in enumerate(GRADIENTS, 1):
        m, v = 0.7 * m + 0.3 * gradient, 0.9 * v + 0.1 * gradient**2
        w = w * (1 - 0.1 * decay)
        w = w - 0.1 * (m / (1 - 0.7**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
    return w


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "sgd"}, lambda w, decay: sgd(w, decay, nesterov=False)),
        ({"name": "sgd", "nesterov": True}, lambda w, decay: sgd(w, decay, nesterov=True)),
        ({"name": "adamw", "betas": (0.7, 0.9)}, adamw),
    ],
)
def test_two_steps_by_hand(options: dict[str, Any], expected: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    weight, bias = (p.detach().clone() for p in (layer.weight, layer.bias))
    part = OptimizerConfig(lr=0.1, momentum=0.8, weight_decay=0.5, **options)
    optimizer = build_optimizer(layer, part)
    for gradient in GRADIENTS:
        layer.weight.grad, layer.bias.grad = gradient.clone(), gradient[0].clone()
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), expected(weight, 0.5))
    torch.testing.assert_close(layer.bias.detach(), expected(bias.expand(2, 2), 0.0)[0])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_run_of_an_older_version_resumes(name: str, tmp_path: Path) -> None:
    """In which α and β had no axis, nor had their moments."""
    recipe = tiny("--optimizer.name", name, "--optimizer.lr", "1e-3")
    train(recipe, tmp_path, SILENT)
    expected = load_checkpoint(tmp_path / "last.pt")["model"]
    state = load_checkpoint(tmp_path / "previous.pt")  # after the first epoch
    moments = list(state["optimizer"]["state"].values())
    for tensors in (state["model"], *moments):
        tensors |= {key: t.reshape(()) for key, t in tensors.items() if getattr(t, "shape", None) == (1,)}
    assert sum(t.dim() == 0 for values in moments for key, t in values.items() if key != "step") >= 2
    save_checkpoint(tmp_path, state)
    train(recipe, tmp_path, SILENT, resume=True)
    resumed = load_checkpoint(tmp_path / "last.pt")["model"]
    assert all(torch.equal(resumed[key], value) for key, value in expected.items())
