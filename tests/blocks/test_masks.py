"""Positions of weight 0 have no effect on any other; weights are multiplicities."""

import copy

import pytest
import torch
from cases import (
    CHANNELS,
    SUMMARIZING,
    Case,
    assert_all_close,
    assert_close,
    image,
    with_gradients,
)
from torch import Tensor

import polynl

EQUIVARIANT = [case for case in SUMMARIZING if case.equivariant]
WITH_BATCH_NORMS = [
    case for case in SUMMARIZING if case.name == "latent_gnn" or case.options.get("norm") == "batch"
]
every_case = pytest.mark.parametrize("case", SUMMARIZING, ids=str)
every_equivariant_case = pytest.mark.parametrize("case", EQUIVARIANT, ids=str)
every_side = pytest.mark.parametrize("side", [(6, 4), (12, 12)], ids=str)
"""The second is large enough for the Gram forms."""


def kept_positions(x: Tensor) -> Tensor:
    """A mask (b, *spatial) that keeps about two in three, not the same in every sample."""
    keep = torch.rand(x[:, 0].shape, generator=torch.Generator().manual_seed(3)) < 2 / 3
    assert keep.any()
    assert not keep.all()
    return keep


def some_map(case: Case, *side: int, batch: int = 2) -> Tensor:
    return image(case, batch, CHANNELS, *side, dtype=torch.float64)


@pytest.mark.parametrize("case", [case for case in SUMMARIZING if case.pointwise], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.float32], ids=str)
@every_side
def test_a_masked_block_attends_to_the_masked_summary(
    case: Case, dtype: torch.dtype, side: tuple[int, int]
) -> None:
    block, x = case.build(torch.float64), some_map(case, *side)
    mask = kept_positions(x).to(dtype)
    if dtype != torch.bool:
        mask = mask * torch.rand(mask.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert_all_close(
        with_gradients(block, lambda x: block(x, mask), x),
        with_gradients(block, lambda x: block.attend(x, block.summarize(x, mask)), x),
    )


@every_case
@every_side
def test_a_mask_of_ones_is_no_mask(case: Case, side: tuple[int, int]) -> None:
    block, x = case.build(torch.float64), some_map(case, *side)
    expected = with_gradients(block, block, x)
    for dtype in (torch.bool, torch.float64):
        mask = torch.ones(x[:, 0].shape, dtype=dtype)
        assert_all_close(with_gradients(block, lambda x, mask=mask: block(x, mask), x), expected)


@every_case
@every_side
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30], ids=str)
def test_what_masked_positions_hold_has_no_effect(case: Case, value: float, side: tuple[int, int]) -> None:
    block, x = case.build(torch.float64), some_map(case, *side)
    keep = kept_positions(x).unsqueeze(1)
    expected = with_gradients(block, lambda x: block(x, keep[:, 0]), x, keep)
    z, dx, *others = with_gradients(block, lambda x: block(x, keep[:, 0]), x.masked_fill(~keep, value), keep)
    assert_close(z.masked_fill(~keep, 0), expected[0].masked_fill(~keep, 0))
    assert_close(dx.masked_fill(~keep, 0), expected[1].masked_fill(~keep, 0))
    assert not dx.masked_fill(keep, 0).any()
    assert_all_close(others, expected[2:])


@every_case
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30], ids=str)
def test_summaries_do_not_hold_what_masked_positions_hold(case: Case, value: float) -> None:
    block, x = case.build(torch.float64), some_map(case, 6, 4)
    keep = kept_positions(x)
    clean = block.summarize(x, keep)
    found = block.summarize(x.masked_fill(~keep.unsqueeze(1), value), keep)
    y = some_map(case, 3, 5)
    assert torch.equal(found.count, clean.count)
    assert torch.equal(block.attend(y, found), block.attend(y, clean))


@every_equivariant_case
@every_side
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_a_mask_cuts_positions_out(case: Case, dtype: torch.dtype, side: tuple[int, int]) -> None:
    block, x = case.build(torch.float64), some_map(case, *side, batch=1).flatten(2)
    keep = kept_positions(x)
    masked = with_gradients(block, lambda x: block(x, keep.to(dtype)), x, keep.unsqueeze(1))
    cut = x[..., keep[0]].requires_grad_()
    z = case.expected(block, cut)
    cotangent = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(7))
    found = torch.autograd.grad(
        z, [cut, *block.parameters()], cotangent[..., keep[0]], materialize_grads=True
    )
    assert_close(masked[0][..., keep[0]], z)
    assert_close(masked[1][..., keep[0]], found[0])
    assert_all_close(masked[2:], found[1:])


@every_equivariant_case
@every_side
def test_weights_are_multiplicities(case: Case, side: tuple[int, int]) -> None:
    """A position of weight 1/2 that is there twice counts as one of weight 1."""
    block, x = case.build(torch.float64), some_map(case, *side).flatten(2)
    weights = torch.rand(x[:, 0].shape, generator=torch.Generator().manual_seed(4)).double()

    def doubled(x: Tensor) -> Tensor:
        return block(torch.cat([x, x], -1), torch.cat([weights, weights], -1) / 2)[..., : x.shape[-1]]

    assert_all_close(with_gradients(block, doubled, x), with_gradients(block, lambda x: block(x, weights), x))


@every_equivariant_case
def test_a_position_of_weight_one_counts_as_two_of_weight_one_half(case: Case) -> None:
    block, x = case.build(torch.float64), some_map(case, 6, 4).flatten(2)
    weights = torch.ones(x[:, 0].shape, dtype=torch.float64)
    weights[:, ::2] = 0.5
    halves = torch.full((2, 36), 0.5)
    assert_all_close(
        with_gradients(block, lambda x: block(x, weights, context=x), x),
        with_gradients(block, lambda x: block(x, halves, context=torch.cat([x, x[..., 1::2]], dim=-1)), x),
    )


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [slice(1, 2), slice(None)], ids=["one of three", "all"])
def test_samples_without_a_position_that_counts(case: Case, masked: slice, dtype: torch.dtype) -> None:
    block, x = case.build(dtype), some_map(case, 6, 4, batch=3).to(dtype)
    mask = torch.ones(x[:, 0].shape, dtype=torch.bool)
    mask[masked] = False
    found = with_gradients(block, lambda x: block(x, mask), x)
    assert all(tensor.isfinite().all() for tensor in found)
    z, tolerance = found[0], 1e-12 if dtype == torch.float64 else 1e-5
    if case.pointwise:
        nothing = block.summarize(x[masked, ..., :0])
        assert_close(z[masked], block.attend(x[masked], nothing), tolerance)
    if mask.any():
        assert_close(z[::2], block(x[::2]), tolerance)


@every_case
def test_the_identity_start_is_the_identity_with_mask_and_context(case: Case) -> None:
    x = image(case, 2, CHANNELS, 5, 4)
    block = polynl.build_block(case.name, CHANNELS, **{**case.options, "init": "identity"})
    if case.options.get("kernel_size") != 3:
        # A convolution sees masked positions as padding, also its own.
        assert torch.equal(block.eval()(x, kept_positions(x)), x)
        assert torch.equal(block.train()(x, kept_positions(x)), x)
    assert torch.equal(block.eval()(x, context=2 * x[..., :3]), x)


# Norms over positions


def moments(block: polynl.Block) -> list[Tensor]:
    return [buffer.clone() for buffer in block.buffers()]


@pytest.mark.parametrize("case", WITH_BATCH_NORMS, ids=str)
def test_batch_norms_in_training_see_the_positions_that_count(case: Case) -> None:
    """Values, gradients and running statistics are those of the map without the others."""
    block, x = case.build(torch.float64).train(), some_map(case, 6, 4, batch=1).flatten(2)
    keep = kept_positions(x)
    other = copy.deepcopy(block)
    dirty = x.masked_fill(~keep.unsqueeze(1), float("nan"))
    z, dx, *others = with_gradients(block, lambda x: block(x, keep), dirty, keep.unsqueeze(1))
    cotangent = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(7))
    cut = x[..., keep[0]].requires_grad_()
    expected = other(cut)
    found = torch.autograd.grad(expected, [cut, *other.parameters()], cotangent[..., keep[0]])
    assert_close(z[..., keep[0]], expected)
    assert_close(dx[..., keep[0]], found[0])
    assert_all_close(others, found[1:])
    assert_all_close(moments(block), moments(other))


@pytest.mark.parametrize("case", WITH_BATCH_NORMS, ids=str)
def test_batch_norms_in_training_with_samples_that_do_not_count(case: Case) -> None:
    block, x = case.build(torch.float64).train(), some_map(case, 6, 4, batch=3)
    other, mask = copy.deepcopy(block), torch.ones(x[:, 0].shape, dtype=torch.bool)
    mask[1] = False
    found = with_gradients(block, lambda x: block(x, mask), x)
    assert all(tensor.isfinite().all() for tensor in found)
    assert_close(found[0][::2], other(x[::2]))
    assert_all_close(moments(block), moments(other))
    before = moments(block)
    found = with_gradients(block, lambda x: block(x, torch.zeros_like(mask)), x)
    assert all(tensor.isfinite().all() for tensor in found)
    for now, then in zip(moments(block), before, strict=True):
        assert torch.equal(now, then) or not now.is_floating_point()


@pytest.mark.parametrize("case", [c for c in EQUIVARIANT if c.options.get("norm") == "layer"], ids=str)
def test_layer_norms_see_the_positions_that_count(case: Case) -> None:
    block, x = case.build(torch.float64), some_map(case, 6, 4, batch=1).flatten(2)
    keep = kept_positions(x)
    for mode in (block.eval(), block.train()):
        z = mode(x.masked_fill(~keep.unsqueeze(1), float("inf")), keep)
        assert_close(z[..., keep[0]], case.expected(block, x[..., keep[0]]))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 4, 5), ValueError, r"mask has shape \(2, 4, 5\); expected \(2, 5, 4\), a weight per"),
        (torch.ones(2, 1, 5, 4), ValueError, r"mask has shape \(2, 1, 5, 4\); expected \(2, 5, 4\)"),
        (
            torch.ones(2, 5, 4).int(),
            TypeError,
            r"mask has dtype torch.int32; expected torch.bool or floating",
        ),
        ([[True]], TypeError, r"mask is a list; expected a tensor"),
    ],
    ids=["transposed", "channels", "integer", "list"],
)
@pytest.mark.parametrize("name", [name for name in polynl.BLOCKS if name != "tesa"])
def test_bad_masks(name: str, mask: object, error: type[Exception], message: str) -> None:
    block, x = polynl.build_block(name, CHANNELS), torch.zeros(2, CHANNELS, 5, 4)
    for call in (block, block.summarize, lambda x, mask: block(x[..., :2], mask, context=x)):
        with pytest.raises(error, match=rf"^{type(block).__name__}: {message}"):
            call(x, mask)
