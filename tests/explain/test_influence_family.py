"""What positions contribute in linear attention, by sums over pairs; gates and XCA have no such parts."""

from typing import Any

import pytest
import torch
from literal_parts import CHANNELS, built
from torch import Tensor

from polynl import (
    XCA,
    GlobalContext,
    GlobalResponseNorm,
    HydraAttention,
    ReLULinearAttention,
    SeparableAttention,
    SqueezeExcite,
)
from polynl.explain.influence import contributions, influence


def relu_linear(block: Any, x: Tensor, i: int) -> Tensor:
    q, k = block.q(x).clamp_min(0), block.k(x).clamp_min(0)
    similarities = k @ q[i]
    return similarities[:, None] * block.v(x) / (similarities.sum() + 1e-5)


def separable(block: Any, x: Tensor, i: int) -> Tensor:
    return block.scores(x).softmax(dim=0) * block.keys(x) * block.values(x)[i].clamp_min(0)


def hydra(block: Any, x: Tensor, i: int) -> Tensor:
    q, k = (t / t.norm(dim=1, keepdim=True) for t in (block.query(x), block.key(x)))
    return q[i] * k * block.value(x)


@pytest.mark.parametrize(
    ("kind", "literal"),
    [(ReLULinearAttention, relu_linear), (SeparableAttention, separable), (HydraAttention, hydra)],
)
@pytest.mark.parametrize("residual", [True, False])
def test_each_contribution_is_the_literal_one(kind: type, literal: Any, residual: bool) -> None:
    block = built(kind, {"residual": residual, "init": "random"})
    x = torch.randn(1, CHANNELS, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = x[0].flatten(1).T
    expected = literal(block, rows, 5) @ block.out.weight.T
    found = contributions(block, x, (1, 1))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found.parts[0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.total()[0], block(x)[0, :, 1, 1], rtol=0, atol=1e-12)
    shares = influence(block, x, (1, 1))
    torch.testing.assert_close(shares.sum(), torch.ones_like(shares.sum()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", [XCA, SqueezeExcite, GlobalContext, GlobalResponseNorm])
def test_the_others_say_why_there_is_none(kind: type) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} has no influence maps: its output is not a sum"):
        influence(kind(CHANNELS), torch.randn(1, CHANNELS, 3, 4), (1, 1))
