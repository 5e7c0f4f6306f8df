"""Contributions and influence: each pair of positions by hand, and the sum that they must have."""

import copy
import itertools
import sys
from typing import Any

import pytest
import torch
from literal_parts import ATTENDING, CHANNELS, MIXING, assert_close, built, feature_map, literal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polynl
from polynl import EfficientNL, NonLocal, PolyNL
from polynl.explain import contributions, influence

CASES = MIXING + ATTENDING
MODULE = sys.modules[contributions.__module__]  # its name in the package is that of the function
SHAPES = [(1, (7,)), (2, (3, 4)), (3, (5, 2)), (2, (3, 2, 3)), (1, (1, 1))]

Case = tuple[type, dict[str, Any]]


def named(case: Case) -> str:
    kind, options = case
    return "-".join([kind.__name__, *(f"{name}={value}" for name, value in options.items())])


every_case = pytest.mark.parametrize("case", CASES, ids=named)
one_of_each_kind = pytest.mark.parametrize(
    "case",
    [MIXING[2], MIXING[7], ATTENDING[4], ATTENDING[6], ATTENDING[8], ATTENDING[11], ATTENDING[14]],
    ids=named,
)


def some_places(spatial: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The first, the last and one between them."""
    everywhere = list(itertools.product(*map(range, spatial)))
    return [everywhere[0], everywhere[len(everywhere) // 2], everywhere[-1]]


def flat(place: tuple[int, ...], spatial: tuple[int, ...]) -> int:
    return list(itertools.product(*map(range, spatial))).index(place)


# Values


@every_case
@pytest.mark.parametrize(("batch", "spatial"), SHAPES, ids=str)
def test_each_contribution_is_the_literal_one(case: Case, batch: int, spatial: tuple[int, ...]) -> None:
    block, x = built(*case), feature_map(batch, spatial)
    parts, own = literal(copy.deepcopy(block), x)
    assert parts.abs().max() > 0.01, "parts of nothing prove nothing"
    for place in some_places(spatial):
        found, i = contributions(block, x, place), flat(place, spatial)
        assert found.spatial.numel() == parts.shape[2]
        assert len(found.spatial) == len(spatial)
        assert_close(found.parts, parts[:, i], 1e-12)
        assert_close(found.own, own[:, i], 1e-12)


@every_case
@pytest.mark.parametrize(
    ("batch", "spatial", "dtype", "tolerance"),
    [(3, (5, 2), torch.float32, 1e-5), *((*shape, torch.float64, 1e-12) for shape in SHAPES)],
    ids=str,
)
def test_contributions_sum_to_the_output(
    case: Case,
    batch: int,
    spatial: tuple[int, ...],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    block, x = built(*case, dtype), feature_map(batch, spatial, dtype)
    with torch.no_grad():
        z = block(x)
    for place in some_places(spatial):
        total = contributions(block, x, place).total()
        assert total.dtype == dtype
        assert_close(total, z[(..., *place)], tolerance)


@pytest.mark.parametrize("case", [MIXING[0], MIXING[3], ATTENDING[2], ATTENDING[6], ATTENDING[14]], ids=named)
def test_contributions_of_thousands_of_positions_sum_to_the_output_in_fp32(
    case: Case,
) -> None:
    block, x = built(*case, torch.float32), feature_map(1, (96, 96), torch.float32)
    with torch.no_grad():
        z = block(x)[:, :, 3, 90]
    assert_close(contributions(block, x, (3, 90)).total(), z, 1e-5)


@pytest.mark.parametrize("case", [ATTENDING[4], ATTENDING[6], ATTENDING[12]], ids=named)
def test_biases_that_are_large_do_not_round_contributions_that_are_small(case: Case) -> None:
    block, x = built(*case), feature_map(1, (3, 4))
    layer = block.out if block.out.norm is None else block.out.norm
    nn.init.constant_(layer.bias, 1e4)
    expected, shares = contributions(block, x, (1, 2)).parts, influence(block, x, (1, 2))
    block.float()
    assert_close(contributions(block, x, (1, 2)).parts, expected, 1e-5)
    assert_close(influence(block, x, (1, 2)), shares, 1e-5)


@every_case
@pytest.mark.parametrize(("batch", "spatial"), [(2, (3, 4)), (1, (7,)), (2, (3, 2, 3))], ids=str)
def test_shares_are_projections_of_contributions_and_sum_to_one(
    case: Case, batch: int, spatial: tuple[int, ...]
) -> None:
    block, x = built(*case), feature_map(batch, spatial)
    parts, _ = literal(copy.deepcopy(block), x)
    for place in some_places(spatial):
        at = parts[:, flat(place, spatial)]
        y = at.sum(dim=1, keepdim=True)
        expected = (at * y).sum(-1) / (y * y).sum(-1)
        shares = influence(block, x, place)
        assert shares.shape[1:] == contributions(block, x, place).spatial
        assert_close(shares.flatten(1), expected, 1e-11)  # a quotient of two that agree to 1e-12
        assert_close(shares.flatten(1).sum(1), torch.ones(batch), 1e-11)


@every_case
def test_weights_take_the_mean_over_a_box(case: Case) -> None:
    block, x = built(*case), feature_map(2, (4, 3))
    weights = torch.zeros(2, 4, 3, dtype=torch.float64)
    weights[0, 1:3, :2] = 1 / 4
    weights[1, 3, :] = 1 / 3
    parts, own = literal(copy.deepcopy(block), x)
    rows = weights.flatten(1)
    parts, own = torch.einsum("bn,bnmc->bmc", rows, parts), torch.einsum("bn,bnc->bc", rows, own)
    found = contributions(block, x, weights)
    assert_close(found.parts, parts, 1e-12)
    assert_close(found.own, own, 1e-12)
    y = parts.sum(dim=1, keepdim=True)
    expected = (parts * y).sum(-1) / (y * y).sum(-1)
    assert_close(influence(block, x, weights).flatten(1), expected, 1e-11)


@every_case
def test_an_index_is_a_weight_of_one(case: Case) -> None:
    block, x = built(*case), feature_map(2, (3, 4))
    weights = torch.zeros(2, 3, 4, dtype=torch.float64)
    weights[:, 2, 1] = 1
    one, other = contributions(block, x, (2, 1)), contributions(block, x, weights)
    assert torch.equal(one.parts, other.parts)
    assert torch.equal(one.own, other.own)
    assert torch.equal(influence(block, x, (2, 1)), influence(block, x, weights))


@every_case
def test_the_layout_of_the_map_does_not_matter(case: Case) -> None:
    block, x = built(*case), feature_map(2, (3, 4))
    last = x.contiguous(memory_format=torch.channels_last)
    assert_close(contributions(block, last, (2, 1)).parts, contributions(block, x, (2, 1)).parts, 1e-12)
    assert_close(influence(block, last, (2, 1)), influence(block, x, (2, 1)), 1e-12)


def test_poly_nl_has_shares_while_beta_is_zero() -> None:
    block, x = built(PolyNL, {}), feature_map(2, (3, 4))
    expected = influence(block, x, (1, 1))
    nn.init.zeros_(block.beta)
    assert torch.equal(influence(block, x, (1, 1)), expected)
    assert not contributions(block, x, (1, 1)).parts.any()


@pytest.mark.parametrize(
    "case", [(NonLocal, {}), (NonLocal, {"norm": "batch"}), (EfficientNL, {})], ids=named
)
def test_shares_are_zero_where_a_block_adds_nothing(case: Case) -> None:
    kind, options = case
    x = feature_map(2, (3, 4), torch.float32)
    assert torch.equal(influence(kind(CHANNELS, **options), x, (1, 1)), torch.zeros(2, 3, 4))


def test_shares_are_zero_in_the_sample_that_is_zero_only() -> None:
    block, x = built(PolyNL, {}), feature_map(2, (3, 4))
    x[0] = 0
    shares = influence(block, x, (1, 1))
    assert not shares[0].any()
    assert_close(shares[1].sum(), torch.ones(()), 1e-12)


def test_weights_of_nothing_give_nothing() -> None:
    for kind, options in (MIXING[0], ATTENDING[0], ATTENDING[5]):
        block, x = built(kind, options), feature_map(2, (3, 4))
        found = contributions(block, x, torch.zeros(2, 3, 4))
        assert not found.total().any()
        assert not influence(block, x, torch.zeros(2, 3, 4)).any()


# Memory


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operator makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("part", [contributions, influence], ids=lambda part: part.__name__)
def test_memory_is_linear_in_the_positions(case: Case, dtype: torch.dtype, part: Any) -> None:
    block, x = built(*case, dtype), feature_map(1, (32, 32), dtype)
    with Largest() as largest:
        part(block, x, (3, 4))
    # A matrix of C×C for each position, of twice as many channels where keys are padded or there are heads.
    assert 1024 <= largest.numbers <= 2 * 1024 * CHANNELS**2 < 1024**2 // 8


@pytest.mark.parametrize(
    "case", [ATTENDING[1], ATTENDING[5], ATTENDING[10], ATTENDING[12], MIXING[0]], ids=named
)
def test_memory_is_bounded_for_a_box_of_all_positions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = built(*case), feature_map(1, (16, 16))
    weights = torch.full((1, 16, 16), 1 / 256, dtype=torch.float64)
    expected = contributions(block, x, weights).parts
    monkeypatch.setattr(MODULE, "CHUNK", 9 * 256)
    with Largest() as largest:
        found = contributions(block, x, weights).parts
    assert largest.numbers <= 256 * CHANNELS**2 < 256**2
    assert_close(found, expected, 1e-12)


def test_the_matrix_of_all_pairs_would_have_been_seen() -> None:
    block = built(NonLocal, {"mode": "concatenation"})
    with Largest() as largest, torch.no_grad():
        block(feature_map(1, (32, 32)))
    assert largest.numbers >= 1024**2


@pytest.mark.parametrize("at_a_time", [1, 3 * 2 * CHANNELS**2, 5 * 2 * CHANNELS**2])
def test_parts_are_the_same_however_many_are_made_at_a_time(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x = built(PolyNL, {}), feature_map(2, (3, 4))
    expected = contributions(block, x, (1, 2)).parts
    monkeypatch.setattr(MODULE, "CHUNK", at_a_time)
    with Largest() as largest:
        found = contributions(block, x, (1, 2)).parts
    assert_close(found, expected, 1e-12)
    assert largest.numbers <= max(at_a_time, x.numel()) < x.numel() * CHANNELS


# Modes and dtypes, and that the block stays unchanged


@one_of_each_kind
def test_a_block_in_training_is_evaluated_in_eval_mode_and_restored(
    case: Case,
) -> None:
    block, x = built(*case), feature_map(2, (3, 4))
    expected, shares = contributions(block, x, (1, 2)), influence(block, x, (1, 2))
    next(block.train().children()).eval()
    flags = [module.training for module in block.modules()]
    before = copy.deepcopy(block.state_dict())
    x.requires_grad_()
    found = contributions(block, x, (1, 2))
    assert torch.equal(found.parts, expected.parts)
    assert torch.equal(found.own, expected.own)
    assert torch.equal(influence(block, x, (1, 2)), shares)
    assert [module.training for module in block.modules()] == flags
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in block.parameters())
    assert x.grad is None
    assert not any(made.requires_grad for made in (found.parts, found.own, shares))


@one_of_each_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
def test_works_without_gradients_on_maps_made_without(case: Case, mode: Any, last: bool) -> None:
    block = built(*case, torch.float32)
    with mode():
        x = feature_map(2, (3, 4), torch.float32)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        parts, shares = contributions(block, x, (1, 2)).parts, influence(block, x, (1, 2))
        weighted = influence(block, x, torch.ones(2, 3, 4))
    assert_close(parts, literal(built(*case), x.clone())[0][:, 6], 1e-5)
    assert_close(shares.flatten(1).sum(1), torch.ones(2), 1e-5)
    assert_close(weighted.flatten(1).sum(1), torch.ones(2), 1e-5)


@one_of_each_kind
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_half_precision_is_computed_in_fp32(case: Case, half: torch.dtype, given: torch.dtype) -> None:
    """What it computes is exact for the block's rounded parameters and the rounded map."""
    block, x = built(*case, half).train(), feature_map(2, (3, 4), given)
    parts, _ = literal(copy.deepcopy(block), x.float())
    found, shares = contributions(block, x, (1, 2)), influence(block, x, (1, 2))
    assert found.parts.dtype == shares.dtype == torch.float32
    assert_close(found.parts, parts[:, 6], 1e-5)
    assert_close(shares.flatten(1).sum(1), torch.ones(2), 1e-5)
    assert block.dtype == half
    assert all(module.training for module in block.modules())


@one_of_each_kind
@pytest.mark.parametrize("given", [torch.float16, torch.float64], ids=str)
def test_a_map_of_another_dtype_is_taken_in_that_of_the_block(case: Case, given: torch.dtype) -> None:
    block, x = built(*case, torch.float32), feature_map(2, (3, 4), given)
    found = contributions(block, x, (1, 2))
    assert torch.equal(found.parts, contributions(block, x.float(), (1, 2)).parts)
    assert torch.equal(influence(block, x, (1, 2)), influence(block, x.float(), (1, 2)))


@one_of_each_kind
def test_autocast_changes_nothing(case: Case) -> None:
    block, x = built(*case, torch.float32), feature_map(2, (3, 4), torch.float32)
    expected, shares = contributions(block, x, (1, 2)), influence(block, x, (1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(contributions(block, x, (1, 2)).parts, expected.parts)
        assert torch.equal(contributions(block, x, (1, 2)).own, expected.own)
        assert torch.equal(influence(block, x, (1, 2)), shares)


def test_synchronised_norms_are_norms() -> None:
    block, x = built(NonLocal, {"norm": "batch"}), feature_map(2, (3, 4))
    expected = contributions(block, x, (1, 2))
    found = contributions(nn.SyncBatchNorm.convert_sync_batchnorm(block), x, (1, 2))
    assert_close(found.parts, expected.parts, 1e-12)
    assert_close(found.own, expected.own, 1e-12)


# Errors


@pytest.mark.parametrize("part", [contributions, influence], ids=lambda part: part.__name__)
@pytest.mark.parametrize("name", ["tesa", "latent_gnn", "polynomial", "conv"])
def test_other_blocks_have_no_influence(part: Any, name: str) -> None:
    block = polynl.build_block(name, CHANNELS)
    with pytest.raises(
        ValueError, match=f"^{type(block).__name__} has no influence maps: its output is not a sum"
    ):
        part(block, feature_map(1, (3, 4), torch.float32), (0, 0))


@pytest.mark.parametrize("part", [contributions, influence], ids=lambda part: part.__name__)
@pytest.mark.parametrize(
    ("block", "shape", "place", "said"),
    [
        (nn.Conv2d(4, 4, 1), (1, 4, 2, 3), (0, 0), "Conv2d has no influence maps"),
        (NonLocal(4, norm="layer"), (1, 4, 2, 3), (0, 0), "NonLocal has no influence maps with norm='layer'"),
        (NonLocal(4, norm="layer", mode="gaussian"), (1, 4, 2, 3), (0, 0), "norm='layer'"),
        (PolyNL(4), (1, 4, 2, 3), (2, 0), r"place=\(2, 0\) is not on the map, which is \(2, 3\)"),
        (PolyNL(4), (1, 4, 2, 3), (1.5, 0), r"place=\(1.5, 0\) is not on the map, which is \(2, 3\)"),
        (PolyNL(4), (1, 4, 2, 3), 3, r"place=3 is not on the map, which is \(2, 3\)"),
        (PolyNL(4), (1, 4, 2, 3), (0, 3), "is not on the map"),
        (EfficientNL(4), (1, 4, 2, 3), (-1, 0), "is not on the map"),
        (PolyNL(4), (1, 4, 2, 3), (1,), "is not on the map"),
        (PolyNL(4), (1, 4, 6), (1, 1), "is not on the map"),
        (PolyNL(4), (2, 4, 2, 3), torch.ones(2, 3), r"shape \(2, 3\); expected weights \(2, 2, 3\)"),
        (EfficientNL(4), (2, 4, 2, 3), torch.ones(1, 2, 3), r"expected weights \(2, 2, 3\)"),
        (PolyNL(4), (1, 5, 2, 3), (0, 0), r"PolyNL: x has shape \(1, 5, 2, 3\); expected a batch of maps"),
        (EfficientNL(4), (4, 2, 3), (0, 0), "add a batch axis"),
    ],
)
def test_errors_say_what_was_expected(part: Any, block: Any, shape: Any, place: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        part(block, torch.zeros(shape), place)
    assert "\n" not in str(error.value)


def test_an_error_leaves_the_flags_of_training() -> None:
    block = NonLocal(4, mode="gaussian").train()
    with pytest.raises(ValueError, match="is not on the map"):
        contributions(block, torch.zeros(1, 4, 2, 3), (2, 0))
    assert all(module.training for module in block.modules())


@pytest.mark.parametrize("scale", [1e-8, 1e7])
def test_shares_do_not_depend_on_the_scale_of_the_map(scale: float) -> None:
    """Its cubes would vanish, or overflow, in single precision."""
    torch.manual_seed(0)
    block, x = PolyNL(8, init="random"), torch.randn(2, 8, 3, 4)
    shares = influence(block, scale * x, (1, 2))
    assert torch.allclose(shares, influence(block, x, (1, 2)), rtol=1e-3, atol=1e-5)
    assert torch.allclose(shares.sum(dim=(1, 2)), torch.ones(2), atol=1e-5)
