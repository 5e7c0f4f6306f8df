"""MONAI: blocks with its `spatial_dims` and `in_channels`, built by a bundle's parser and in its networks."""

import pytest
import torch
from torch import nn

import polynl
from polynl.integrations import monai as blocks

pytest.importorskip("monai", reason="monai is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_example_in_the_docs(run_example):
    assert run_example("monai", "integrations.md")["block"].reduction == 2


@pytest.mark.parametrize("name", polynl.BLOCKS)
@pytest.mark.parametrize("spatial_dims", [1, 2, 3])
def test_every_block_in_a_network_of_convolutions(name, spatial_dims):
    from monai.networks.blocks import Convolution

    kind = polynl.BLOCKS[name].block
    block = getattr(blocks, kind.__name__)(spatial_dims, in_channels=8)
    assert type(block) is kind
    network = nn.Sequential(Convolution(spatial_dims, 1, 8), block, Convolution(spatial_dims, 8, 2))
    x = torch.randn(2, 1, *[6] * spatial_dims)
    assert network(x).shape == (2, 2, *[6] * spatial_dims)


@pytest.mark.parametrize("spatial_dims", [1, 2, 3])
def test_options_that_depend_on_the_number_of_axes(spatial_dims):
    x = torch.randn(2, 8, *[5] * spatial_dims)
    for block in (
        blocks.ConvBaseline(spatial_dims, 8, kernel_size=3, init="random"),
        blocks.TESA(spatial_dims, 8, fusion="concat", init="random"),
    ):
        assert block.spatial_axes == spatial_dims
        assert block(x).shape == x.shape


def test_wrong_dimensions_and_names():
    with pytest.raises(ValueError, match="spatial_dims=4: expected 1, 2 or 3"):
        blocks.PolyNL(4, 8)
    with pytest.raises(AttributeError, match="has no attribute 'PolyNl'"):
        blocks.PolyNl  # noqa: B018
    assert set(blocks.__all__) == {row.block.__name__ for row in polynl.BLOCKS.values()}
