"""ultralytics: a trainer whose `get_model` inserts blocks trains, saves and loads them."""

import pytest
import torch
from PIL import Image

import polynl

# Ten layers and the head: there is a layer 9, as in the real yolo11n.yaml.
LAYERS = ["[-1, 1, Conv, [8, 3, 2]]", *["[-1, 1, Conv, [8, 1, 1]]"] * 9]
NETWORK = f"nc: 1\nbackbone: [{', '.join(LAYERS)}]\nhead: [[[9], 1, Detect, [nc]]]\n"


@pytest.fixture
def ultralytics(monkeypatch, tmp_path):
    """The package, with settings and runs in tmp_path instead of the home directory and site-packages."""
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    package = pytest.importorskip("ultralytics", reason="ultralytics is not installed")
    monkeypatch.setattr("ultralytics.cfg.TESTS_RUNNING", False)
    monkeypatch.setitem(package.settings, "runs_dir", str(tmp_path / "runs"))
    return package


@pytest.fixture
def data(tmp_path):
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / kind / split).mkdir(parents=True)
        for name in "ab":
            Image.new("RGB", (32, 32), "red").save(tmp_path / "images" / split / f"{name}.png")
            (tmp_path / "labels" / split / f"{name}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    text = f"path: {tmp_path}\ntrain: images/train\nval: images/val\nnames: [square]\n"
    (tmp_path / "images.yaml").write_text(text)
    # The name of yolo11n.yaml without its scale, which is where ultralytics looks first.
    (tmp_path / "yolo11.yaml").write_text(NETWORK)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("data")
def test_blocks_are_trained_saved_and_loaded(run_example, ultralytics, tmp_path):
    example = run_example("ultralytics")
    best = example["best"]
    block = best.model.model[9].polynl_after
    assert len(best.model.model) == 11
    assert block.beta != 0
    calls = []
    block.register_forward_hook(lambda *_: calls.append(1))
    best.predict(torch.zeros(1, 3, 32, 32), verbose=False)
    assert calls

    again = example["TrainerWithBlocks"].get_model(example["yolo"].trainer, "yolo11n.yaml", best.model, False)
    assert torch.equal(again.model[9].polynl_after.beta, block.beta)
    assert not polynl.inserted(example["YOLO"]("yolo11n.yaml").model)
