"""segmentation_models_pytorch: a model saved with its blocks comes back from its folder."""

import pytest
import torch
from safetensors.torch import load_file

import polynl

pytest.importorskip("segmentation_models_pytorch", reason="segmentation_models_pytorch is not installed")


def test_a_model_with_blocks_comes_back_from_its_folder(run_example):
    example = run_example("segmentation_models_pytorch")
    model, again, smp = example["model"].eval(), example["again"].eval(), example["smp"]
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
        polynl.inserted(again)["encoder.layer3.1.polynl_before"].beta.fill_(1)
        assert not torch.equal(again(x), model(x))
    from_keys = polynl.restore(smp.from_pretrained("unet", strict=False), load_file("unet/model.safetensors"))
    from_keys.load_state_dict(load_file("unet/model.safetensors"))
    assert torch.equal(from_keys.eval()(x), model(x))
