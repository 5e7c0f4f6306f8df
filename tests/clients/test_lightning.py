"""Lightning: checkpoints carry the spec, and modules are built anew with their blocks."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import polynl

pytest.importorskip("lightning", reason="lightning is not installed")


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_brings_the_blocks_back_and_training_goes_on(run_example, tmp_path):
    example = run_example("lightning")
    made, model, lightning = example["Classifier"], example["model"], example["lightning"]
    images = TensorDataset(torch.randn(4, 3, 64, 64), torch.arange(4) % 3)
    batches = DataLoader(images, batch_size=4)

    def trainer(steps):
        return lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    first = trainer(steps=1)
    first.fit(model, batches)
    first.save_checkpoint(tmp_path / "last.ckpt")
    block = polynl.inserted(model)["network.layer3.1.polynl_before"]
    assert block.beta != 0

    again = made.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert torch.equal(again.network.layer3[1].polynl_before.beta, block.beta)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(again.eval().network(x), model.eval().network(x))

    reached = block.beta.item()
    trainer(steps=2).fit(model, batches, ckpt_path=tmp_path / "last.ckpt")
    assert model.network.layer3[1].polynl_before is block
    assert block.beta != reached
