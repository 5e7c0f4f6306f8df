"""timm: every block is an attention layer of its ResNets as it is, and is trained as one."""

import pytest
import torch

import polynl

timm = pytest.importorskip("timm", reason="needs the extra 'timm'")


def test_the_example_in_the_docs(run_example):
    example = run_example("timm", "integrations.md")
    blocks = [module for module in example["narrow_model"].modules() if isinstance(module, polynl.PolyNL)]
    assert {block.reduction for block in blocks} == {4}


@pytest.mark.parametrize("name", polynl.BLOCKS)
def test_every_block_is_an_attention_layer(name):
    torch.manual_seed(0)
    kind = polynl.BLOCKS[name].block
    model = timm.create_model("resnet10t", block_args={"attn_layer": kind}, num_classes=3)
    assert sum(isinstance(module, kind) for module in model.modules()) == 4
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    untouched = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert untouched == []
