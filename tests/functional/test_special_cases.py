"""The paper's claim, for the blocks themselves: dot-product non-local layers are special cases of Eq. 4."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polynl import Block, build_block
from polynl.functional.polynomial import is_third_order, third_order_tensor, triplets

HEIGHT, WIDTH, C = 2, 2, 2
N = HEIGHT * WIDTH

CUBIC = {
    "poly_nl, direct": ("poly_nl", {"form": "direct"}),
    "poly_nl, gram": ("poly_nl", {"form": "gram"}),
    "poly_nl, reduced": ("poly_nl", {"reduction": 2}),
    "non_local, quadratic": ("non_local", {"form": "quadratic", "inner_channels": 2}),
    "non_local, gram": ("non_local", {"form": "gram", "inner_channels": 2}),
    "efficient_nl": ("efficient_nl", {"normalization": "none", "bias": False, "key_channels": 2}),
    "tesa": ("tesa", {}),
    "tesa, quadratic": ("tesa", {"order": "quadratic", "normalization": "none"}),
}
NOT_CUBIC = {
    "gaussian": ("non_local", {"mode": "gaussian"}),
    "embedded gaussian": ("non_local", {"mode": "embedded_gaussian"}),
    "concatenation": ("non_local", {"mode": "concatenation"}),
    "dot product with bias": ("non_local", {"bias": True}),
    "efficient softmax": ("efficient_nl", {"bias": False}),
    "latent_gnn": ("latent_gnn", {"latent_dims": 2, "inner_channels": 2}),
    "conv": ("conv", {}),
    "polynomial": ("polynomial", {}),
}


def branch(name: str, options: dict) -> Callable[[Tensor], Tensor]:
    """X ↦ Y of a block with random parameters: its output without the skip connection."""
    torch.manual_seed(0)
    block = build_block(name, C, **{**options, "init": "random"}).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    skip = 0.0 if name in ("conv", "polynomial") else block.alpha.item() if name == "poly_nl" else 1.0
    return lambda x: on_matrix(block, x) - skip * x


def on_matrix(block: Block, x: Tensor) -> Tensor:
    return block(x.mT.reshape(1, C, HEIGHT, WIDTH))[0].flatten(1).mT


@pytest.mark.parametrize(("name", "options"), CUBIC.values(), ids=CUBIC)
def test_dot_product_blocks_are_contractions_of_eq_4(name: str, options: dict) -> None:
    assert is_third_order(branch(name, options), N, C)


@pytest.mark.parametrize(("name", "options"), NOT_CUBIC.values(), ids=NOT_CUBIC)
def test_the_others_are_not(name: str, options: dict) -> None:
    assert not is_third_order(branch(name, options), N, C)


@pytest.mark.parametrize("name", ["poly_nl, direct", "poly_nl, gram", "non_local, gram", "efficient_nl"])
def test_non_local_triplets(name: str) -> None:
    """y(a,b) uses every x(a,d) x(e,f) x(e,h): one element of its own position, two of any one position."""
    expected = {
        ((a, b), tuple(sorted([(a, d), (e, f), (e, h)])))
        for a in range(N)
        for b in range(C)
        for d in range(C)
        for e in range(N)
        for f in range(C)
        for h in range(C)
    }
    assert triplets(third_order_tensor(branch(*CUBIC[name]), N, C)) == expected


def test_tesa_uses_more_triplets() -> None:
    non_local = triplets(third_order_tensor(branch(*CUBIC["poly_nl, direct"]), N, C))
    tesa = triplets(third_order_tensor(branch(*CUBIC["tesa"]), N, C))
    assert non_local < tesa
    assert any(len({position for position, _ in inputs}) == 3 for _, inputs in tesa)
