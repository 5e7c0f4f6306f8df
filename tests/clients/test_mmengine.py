"""mmengine: a config's custom import registers all blocks, and mmcv builds them as plugin layers."""

import importlib

import pytest
import torch
from torch import nn

import polynl

pytest.importorskip("mmengine", reason="mmengine is not installed")
cnn = pytest.importorskip("mmcv.cnn", reason="mmcv is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def models():
    return importlib.import_module("polynl.integrations.mmengine").MODELS


def test_the_example_in_the_docs(run_example):
    example = run_example("mmengine", "integrations.md")
    assert type(example["block"]) is polynl.PolyNL
    assert example["block"].reduction == 2
    assert type(example["plugin"]) is polynl.NonLocal
    assert (example["plugin"].channels, example["plugin"].mode) == (256, "embedded_gaussian")


@pytest.mark.parametrize("name", polynl.BLOCKS)
def test_every_block_is_a_plugin(name, models):
    kind = polynl.BLOCKS[name].block
    layer_name, layer = cnn.build_plugin_layer({"type": kind.__name__}, postfix="_2", in_channels=8)
    assert layer_name == f"{name}_2"
    assert type(layer) is kind
    assert layer.channels == 8
    assert type(models.build({"type": kind.__name__, "channels": 8})) is kind


@pytest.mark.parametrize("name", polynl.BLOCKS)
def test_initialisation_of_a_model_keeps_new_blocks_the_identity(name, models):
    from mmengine.model import BaseModule

    class Network(BaseModule):
        def __init__(self):
            kinds = {"Kaiming": "Conv2d", "Normal": "Linear", "Constant": ["_BatchNorm", "LayerNorm"]}
            values = {"Normal": {"std": 0.01}, "Constant": {"val": 1}}
            super().__init__([{"type": t, "layer": layer, **values.get(t, {})} for t, layer in kinds.items()])
            self.conv = cnn.ConvModule(3, 8, 3)
            self.block = cnn.build_plugin_layer({"type": polynl.BLOCKS[name].block.__name__}, in_channels=8)[
                1
            ]

    network = Network().eval()
    before = network.conv.conv.weight.clone()
    network.init_weights()
    assert not torch.equal(network.conv.conv.weight, before)
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(network.block(x), x)


def test_a_block_from_the_registry_is_known_to_a_spec(models):
    block = models.build({"type": "EfficientNL", "in_channels": 8, "heads": 2})
    model = polynl.insert(
        nn.Sequential(nn.Identity(), nn.Identity()), lambda channels: block, before="1", channels=8
    )
    (entry,) = polynl.spec(model)["blocks"]
    assert (entry["block"], entry["options"]["heads"]) == ("efficient_nl", 2)


@pytest.mark.parametrize("channels", [{}, {"in_channels": 8, "channels": 8}])
def test_channels_are_given_once(channels, models):
    with pytest.raises(TypeError, match="PolyNL needs in_channels or channels, one of them"):
        models.build({"type": "PolyNL", **channels})


def test_an_unknown_option_is_an_error(models):
    with pytest.raises(TypeError, match="reduktion"):
        models.build({"type": "PolyNL", "in_channels": 8, "reduktion": 2})
