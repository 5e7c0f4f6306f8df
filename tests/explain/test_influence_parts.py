"""Influence on a position of a map that comes in parts: the shares of the whole map."""

from typing import Any

import pytest
import torch
from literal_parts import ATTENDING, MIXING, built, feature_map

from polynl import HydraAttention, ReLULinearAttention, SeparableAttention
from polynl.explain.influence import influence, influence_in_parts

FAMILY: list[tuple[type, dict[str, Any]]] = [
    (kind, {"init": "random"}) for kind in (HydraAttention, ReLULinearAttention, SeparableAttention)
]


@pytest.mark.parametrize(("kind", "options"), [*MIXING, *ATTENDING, *FAMILY])
def test_shares_in_parts_are_those_of_the_whole_map(kind: type, options: dict[str, Any]) -> None:
    block, x = built(kind, options), feature_map(2, (8, 6))
    whole = influence(block, x, (3, 2))
    parts = list(influence_in_parts(block, x[:, :, 3, 2], x.split([4, 2, 2], dim=2)))
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


def test_between_parts_gradients_are_on() -> None:
    block, x = built(*MIXING[0]), feature_map(1, (4, 3))
    for _ in influence_in_parts(block, x[:, :, 0, 0], [x]):
        assert torch.is_grad_enabled()
