"""Contributions and influence of the positions of a context that a block attends to, and of a masked map."""

from typing import Any

import pytest
import torch
from literal_parts import ATTENDING, CHANNELS, MIXING, assert_close, built, feature_map

import polynl
from polynl import EfficientNL
from polynl.explain import contributions, influence

Case = tuple[type, dict[str, Any]]


def named(case: Case) -> str:
    kind, options = case
    return "-".join([kind.__name__, *(f"{name}={value}" for name, value in options.items())])


every_case = pytest.mark.parametrize("case", MIXING + ATTENDING, ids=named)
every_context = pytest.mark.parametrize("spatial", [(4, 6), (2, 2), (9,), (2, 3, 4)], ids=str)


@every_case
@every_context
def test_parts_of_a_context_sum_to_the_output(case: Case, spatial: tuple[int, ...]) -> None:
    block, x, y = built(*case), feature_map(2, (3, 5)), 1.5 * feature_map(2, spatial).flip(1)
    with torch.no_grad():
        z = block(x, context=y)
    assert not torch.allclose(z, block(x))
    for place in ((0, 0), (2, 3)):
        found = contributions(block, x, place, context=y)
        assert found.parts.abs().max() > 0.01, "parts of nothing prove nothing"
        assert len(found.spatial) == len(spatial)
        assert found.spatial == spatial or "sub_sample" in case[1]
        assert_close(found.total(), z[(..., *place)], 1e-12)


@every_case
@every_context
def test_shares_of_a_context_sum_to_one(case: Case, spatial: tuple[int, ...]) -> None:
    block, x, y = built(*case), feature_map(2, (3, 5)), 1.5 * feature_map(2, spatial).flip(1)
    found, shares = contributions(block, x, (1, 4), context=y), influence(block, x, (1, 4), context=y)
    assert shares.shape == (2, *found.spatial)
    added = found.parts.sum(dim=1, keepdim=True)
    expected = (found.parts * added).sum(-1) / (added * added).sum(-1)
    assert_close(shares.flatten(1), expected, 1e-11)
    assert_close(shares.flatten(1).sum(1), torch.ones(2), 1e-11)


@every_case
def test_a_map_as_its_own_context_is_no_context(case: Case) -> None:
    block, x = built(*case), feature_map(2, (3, 4))
    assert torch.equal(
        contributions(block, x, (1, 2), context=x).parts, contributions(block, x, (1, 2)).parts
    )
    assert torch.equal(influence(block, x, (1, 2), context=x), influence(block, x, (1, 2)))


SUMS = [
    (kind, options)
    for kind, options in MIXING + ATTENDING
    if "sub_sample" not in options
    and options.get("mode", "concatenation") == "concatenation"
    and (kind is not EfficientNL or "normalization" in options)
]


@pytest.mark.parametrize("case", SUMS, ids=named)
def test_a_part_is_what_the_output_loses_without_its_position(case: Case) -> None:
    """Up to the number of positions, by which a mean divides."""
    block, x, y = built(*case), feature_map(1, (3, 4)), feature_map(1, (7,)).flip(1)
    found = contributions(block, x, (1, 2), context=y)
    mask = torch.ones(1, 7, dtype=torch.bool)
    mask[:, 3] = False
    with torch.no_grad():
        without = block(x, mask, context=y)[..., 1, 2]
    assert_close(found.own + (found.parts.sum(dim=1) - found.parts[:, 3]) * 7 / 6, without, 1e-12)


@pytest.mark.parametrize("part", [contributions, influence], ids=lambda part: part.__name__)
def test_a_context_that_does_not_fit_is_refused(part: Any) -> None:
    block, x = polynl.PolyNL(CHANNELS), torch.zeros(2, CHANNELS, 3, 3)
    with pytest.raises(ValueError, match=r"^context is a batch of 1; x has 2$"):
        part(block, x, (1, 1), context=x[:1])
    with pytest.raises(ValueError, match=r"PolyNL: x has shape \(2, 3, 3, 3\); expected a batch of maps"):
        part(block, x, (1, 1), context=x[:, :3])


@every_case
def test_masked_positions_contribute_nothing(case: Case) -> None:
    block, x = built(*case), feature_map(2, (4, 6))
    mask = torch.ones(2, 4, 6, dtype=torch.bool)
    mask[0, :, 4:] = mask[1, 2:] = False
    with torch.no_grad():
        z = block(x, mask=mask)
    found, shares = (explain(block, x, (1, 2), mask=mask) for explain in (contributions, influence))
    assert_close(found.total(), z[..., 1, 2], 1e-12)
    assert_close(shares.flatten(1).sum(1), torch.ones(2), 1e-11)
    assert found.parts.unflatten(1, found.spatial)[0, :, -1].abs().max() == 0
    assert shares[1, -1].abs().max() == 0
