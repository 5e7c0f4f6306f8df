"""Frozen norms compute what the norms did in scoring, and stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from polynl import inserted
from polynl.models.norms import freeze_norms
from polynl.models.resnet import resnet


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_frozen_network_computes_what_it_did_in_scoring(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    options = {"norm": "batch", "init": "random"}
    model = resnet("small_resnet", block="non_local", arch_options={"width": 4}, options=options).to(dtype)
    x = torch.randn(4, 3, 16, 16, dtype=dtype)
    model(x)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.eps = 0.01
    expected = model.eval()(x)
    freeze_norms(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert all(value.dtype == dtype for value in model.state_dict().values() if value.is_floating_point())
    torch.testing.assert_close(model(x), expected)


def test_a_frozen_norm_is_the_same_in_training_and_has_nothing_to_learn() -> None:
    torch.manual_seed(0)
    model = resnet("small_resnet", arch_options={"width": 4})
    freeze_norms(model)
    frozen = [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)]
    assert len(frozen) == 1 + 3 * 4
    assert not [parameter for norm in frozen for parameter in norm.parameters()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(4, 3, 16, 16)
    assert torch.equal(model.train()(x), model.eval()(x))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_norm_of_a_block_goes_on_learning() -> None:
    model = resnet("small_resnet", block="non_local", arch_options={"width": 4}, options={"norm": "batch"})
    freeze_norms(model)
    (block,) = inserted(model).values()
    assert isinstance(block.out.norm, nn.BatchNorm1d), "its zero scale must be able to leave zero"
