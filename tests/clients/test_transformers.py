"""transformers: from_pretrained restores blocks, and initialises those that a checkpoint does not have."""

import pytest
import torch

import polynl

pytest.importorskip("transformers", reason="transformers is not installed")
PLACE = "resnet.encoder.stages.1"


@pytest.fixture
def plain(tmp_path):
    """A network without blocks, which is also in the folder `resnet`."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    model = ResNetForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "resnet")
    return model


@pytest.mark.parametrize(
    ("block", "options"), [("poly_nl", {}), ("non_local", {"norm": "batch", "mode": "embedded_gaussian"})]
)
def test_blocks_come_back_trained_or_start_as_the_identity(run_example, plain, block, options):
    made = run_example("transformers")["ResNetWithBlocks"]
    x = torch.randn(2, 3, 32, 32)
    expected = plain(x).logits
    polynl.insert(plain, block, after=PLACE, **options)
    plain.config.polynl = polynl.spec(plain)

    new = made.from_pretrained("resnet", config=plain.config)
    assert torch.equal(new(x).logits, expected)

    with torch.no_grad():
        for tensor in polynl.inserted(new)[f"{PLACE}.polynl_after"].state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 0.5 + 0.5)
    new.save_pretrained("trained")
    assert torch.equal(made.from_pretrained("trained")(x).logits, new(x).logits)
    assert not torch.equal(new(x).logits, expected)

    other_head = made.from_pretrained("trained", num_labels=5, ignore_mismatched_sizes=True)
    kept = zip(other_head.resnet.state_dict().items(), new.resnet.state_dict().values(), strict=True)
    assert [key for (key, tensor), trained in kept if not torch.equal(tensor, trained)] == []


def test_init_weights_is_enough_where_no_other_pretrained_model_is_around_the_block(plain, tmp_path):
    from transformers import ResNetModel

    class WithBlocks(ResNetModel):
        def __init__(self, config):
            super().__init__(config)
            polynl.restore(self, config.polynl)

        def _init_weights(self, module):
            super()._init_weights(module)
            if isinstance(module, polynl.Block):
                module.reset_parameters()

    x = torch.randn(2, 3, 32, 32)
    expected = plain.resnet(x).pooler_output
    plain.resnet.config.polynl = polynl.spec(polynl.insert(plain.resnet, "poly_nl", after="encoder.stages.1"))
    model = WithBlocks.from_pretrained(tmp_path / "resnet", config=plain.resnet.config)
    assert torch.equal(model(x).pooler_output, expected)
