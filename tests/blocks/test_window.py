"""Poly-NL with a window: the mean over the positions around each one, and the whole map as its limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import polynl
from polynl import PolyNL
from polynl.explain import influence
from polynl.functional.window import poly_nl_windowed_reference

CHANNELS = 4


def built(**options: Any) -> PolyNL:
    torch.manual_seed(0)
    block = PolyNL(CHANNELS, init="random", **options).double()
    torch.nn.init.constant_(block.alpha, 0.7)
    torch.nn.init.constant_(block.beta, 1.3)
    return block


def feature_map(*spatial: int) -> Tensor:
    return torch.randn(2, CHANNELS, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reference(block: PolyNL, x: Tensor, window: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    matrices = [layer.weight.mT for layer in (block.w1, block.w2, block.w3)]
    value = None if block.w_value is None else block.w_value.weight.mT
    found = [
        poly_nl_windowed_reference(
            one.flatten(1).mT,
            *matrices,
            one.shape[1:],
            window,
            value,
            None if mask is None else mask[number].flatten(),
        )
        for number, one in enumerate(x)
    ]
    return block.alpha * x + block.beta * torch.stack(found).mT.reshape(x.shape)


def random_mask(x: Tensor) -> Tensor:
    """Numbers, with zeros, and a sample of which all positions but one are masked."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(len(x), *x.shape[2:], generator=generator, dtype=torch.float64)
    mask = mask.masked_fill(mask < 0.3, 0)
    mask[1].zero_().view(-1)[0] = 1
    return mask


@pytest.mark.parametrize(
    ("spatial", "window"),
    [
        ((9,), (3,)),
        ((9,), (4,)),
        ((5, 7), (3, 3)),
        ((5, 7), (1, 6)),
        ((5, 7), (2, 100)),
        ((1, 1), (5, 5)),
        ((3, 4, 5), (3, 2, 9)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", [1, 2])
def test_values_are_those_of_the_literal_formula(
    spatial: tuple[int, ...], window: tuple[int, ...], masked: bool, reduction: int
) -> None:
    block, x = built(window=window, reduction=reduction), feature_map(*spatial)
    mask = random_mask(x) if masked else None
    expected = reference(block, x, window, mask)
    for layout in (x, x.mT.contiguous().mT):
        torch.testing.assert_close(block(layout, mask), expected, atol=1e-12, rtol=1e-12)


def test_the_whole_map_is_the_limit() -> None:
    block, x = built(), feature_map(6, 9)
    whole = block(x)
    block.window = (2 * 6 - 1, 2 * 9 - 1)
    torch.testing.assert_close(block(x), whole, atol=1e-12, rtol=1e-12)
    block.window = 17
    torch.testing.assert_close(block(x), whole, atol=1e-12, rtol=1e-12)
    block.window = (11, 16)
    assert (block(x) - whole).abs().max() > 1e-6
    block.window = None
    assert torch.equal(block(x), whole)


def test_it_can_be_differentiated_in_training_mode_too() -> None:
    block, x = built(window=3).train(), feature_map(4, 5).requires_grad_()
    mask = random_mask(x.detach())
    assert torch.autograd.gradcheck(lambda x: block(x, mask), x)
    assert all(parameter.grad is None for parameter in block.parameters())
    block(x, mask).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in block.parameters())  # type: ignore[union-attr]


def test_what_is_masked_has_no_effect() -> None:
    block, x = built(window=3), feature_map(5, 6)
    mask = torch.ones(2, 5, 6, dtype=torch.bool)
    mask[:, 3:] = False
    other = x.masked_fill(~mask[:, None], torch.nan)
    torch.testing.assert_close(block(other, mask)[:, :, :3], block(x[:, :, :3]), atol=1e-12, rtol=1e-12)


def test_hooked_layers_autocast_and_specs_know_the_window() -> None:
    block, x = built(window=(3, 4)), feature_map(5, 6)
    expected = block(x)
    block.w1.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(block(x), expected)
    single, half = PolyNL(CHANNELS, window=3, init="random"), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = single(half)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, single(half.float()).bfloat16())

    host = polynl.insert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1)), "poly_nl", after="0", window=(3, 4))
    twin = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))
    polynl.restore(twin, json.loads(json.dumps(polynl.spec(host))))
    assert "window=(3, 4)" in repr(twin)


@pytest.mark.parametrize("window", [0, -1, 2.5, True, "3", (3, 0), (), (1, 2, 3, 4)])
def test_bad_windows(window: Any) -> None:
    with pytest.raises(ValueError, match="window"):
        PolyNL(CHANNELS, window=window)
    block = PolyNL(CHANNELS, window=3)
    with pytest.raises(ValueError, match="window"):
        block.window = window
    assert block.window == 3


def test_there_is_no_summary_and_what_needs_one_says_so() -> None:
    block, x = built(window=3), feature_map(4, 5)
    message = "with window=3, every position has a mean of its own, and there is no summary"
    summary = built().summarize(x)
    for use in (
        lambda: block.summarize(x),
        lambda: block.attend(x, summary),
        lambda: block(x, context=x),
        lambda: influence(block, x, (0, 0)),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    with pytest.raises(ValueError, match="cannot be computed in parts: its window is around every position"):
        polynl.Stream(block)
    with pytest.raises(ValueError, match=r"window=\(3, 3\) is for 2 axes; x has 1"):
        built(window=(3, 3))(feature_map(5))


def test_a_window_needs_the_grid_of_tokens() -> None:
    block = PolyNL(4)
    assert not block.uses_grid
    block.window = 3
    assert block.uses_grid
    block.window = None
    assert not block.uses_grid
