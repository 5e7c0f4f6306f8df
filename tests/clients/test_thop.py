"""Counters of operations, which hook layers, count those of a block."""

import pytest
import torch

import polynl

thop = pytest.importorskip("thop", reason="ultralytics-thop is not installed: pip install 'polynl[clients]'")


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_the_products_of_poly_nl_are_counted(form: str) -> None:
    block = polynl.build_block("poly_nl", 16, form=form)
    operations, parameters = thop.profile(block, (torch.randn(1, 16, 8, 8),), verbose=False)
    assert operations == 3 * 64 * 16**2
    assert parameters == 3 * 16**2 + 2


@pytest.mark.parametrize("name", ["non_local", "efficient_nl", "latent_gnn", "tesa"])
def test_the_linear_layers_of_others_are_counted(name: str) -> None:
    block = polynl.build_block(name, 16)
    operations, _ = thop.profile(block, (torch.randn(1, 16, 8, 8),), verbose=False)
    assert operations > 0
