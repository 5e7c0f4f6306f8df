"""LoRA by peft: adapters on the layers of a block learn, and merging them changes nothing."""

from typing import Any

import pytest
import torch
from torch import nn

import polynl

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'polynl[clients]'")

LAYERS = {
    "poly_nl": ["w1", "w2", "w3"],
    "non_local": ["theta", "phi", "g"],
    "efficient_nl": ["queries", "keys", "values"],
    "tesa": ["a", "b", "v"],
}


def assert_adapters_work(block: polynl.Block, size: int, **targets: Any) -> None:
    host = polynl.insert(nn.Sequential(nn.Conv2d(3, 16, 1)), lambda channels: block, after="0")
    x = torch.randn(2, 3, size, size)
    before = host(x)
    adapted = peft.get_peft_model(host, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
    after = adapted(x)
    assert (after - before).abs().max() > 1e-3
    after.square().mean().backward()
    gradients = [p.grad for name, p in adapted.named_parameters() if "lora_" in name]
    assert len(gradients) >= 2
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    torch.testing.assert_close(adapted.merge_and_unload()(x), after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_adapters_on_linear_layers(name: str, size: int) -> None:
    block = polynl.build_block(name, 16, init="random")
    assert_adapters_work(block, size, target_modules=LAYERS[name])


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("options", [{}, {"normalization": "none", "bias": False}], ids=str)
def test_adapters_on_the_output_projection(options: dict[str, Any], size: int) -> None:
    block = polynl.EfficientNL(16, init="random", **options)
    assert_adapters_work(block, size, target_parameters=["out.weight"])


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_adapters_in_either_form(form: Any) -> None:
    assert_adapters_work(polynl.PolyNL(16, form=form, init="random"), 16, target_modules=LAYERS["poly_nl"])
