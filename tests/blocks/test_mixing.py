"""Every dot-product block is X times a small matrix that depends on X only through its Gram matrix."""

import pytest
import torch
from cases import CHANNELS, Case, efficient_nl, non_local, poly_nl, xca

from polynl.functional import gram, mix, tesa_mode

GRAM_FAMILY = [
    Case("poly_nl", poly_nl),
    Case("poly_nl", poly_nl, {"reduction": 4}),
    Case("non_local", non_local, {"form": "quadratic"}),
    Case("non_local", non_local, {"inner_channels": 3, "scale": "inner"}),
    Case("non_local", non_local, {"inner_channels": 8, "scale": "inner"}),
    Case("efficient_nl", efficient_nl, {"normalization": "none", "bias": False}),
    Case("efficient_nl", efficient_nl, {"normalization": "none", "bias": False, "heads": 2}),
    Case("xca", xca),
    Case("xca", xca, {"heads": 4}),
]
family = pytest.mark.parametrize("case", GRAM_FAMILY, ids=str)


def folded_map(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, n, CHANNELS, dtype=torch.float64, generator=generator)


@family
def test_large_maps_are_mixed_by_their_gram_matrix_with_the_literal_values(case: Case) -> None:
    """At this size blocks take the Gram form, whose backward pass is not autograd's own."""
    block = case.build(torch.float64)
    x = folded_map(144).mT.reshape(2, CHANNELS, 12, 12).requires_grad_()
    inputs = [x, *block.parameters()]
    actual, expected = block(x), case.expected(block, x)
    ways = (torch.autograd.grad(z, inputs, torch.ones_like(z)) for z in (actual, expected))
    for ours, literal in zip((actual, *next(ways)), (expected, *next(ways)), strict=True):
        scale = literal.abs().max().item()
        torch.testing.assert_close(ours, literal, rtol=0, atol=1e-12 * scale)


def test_tesa_channel_mode_is_x_times_n_gram() -> None:
    x = folded_map(12)
    maps = x.mT.reshape(2, CHANNELS, 4, 3)
    channel_mode = tesa_mode(maps, maps, maps, axis=1)
    torch.testing.assert_close(channel_mode.flatten(2).mT, mix(x, 12 * gram(x)), rtol=1e-12, atol=1e-12)
