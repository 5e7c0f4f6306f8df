"""ultralytics: blocks that a trainer inserts, or that are lines of a YAML file, are trained and saved."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import polynl
from polynl.train.recipe_file import read_yaml, write_yaml

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


@pytest.fixture
def tasks(ultralytics, monkeypatch):
    """The module that builds models, which knows blocks for the time of the test."""
    tasks = importlib.import_module("ultralytics.nn.tasks")
    monkeypatch.setattr(tasks, "parse_model", tasks.parse_model)
    monkeypatch.delitem(sys.modules, "polynl.integrations.ultralytics", raising=False)
    importlib.import_module("polynl.integrations.ultralytics")
    return tasks


def real_model(ultralytics, row, name="yolo11.yaml"):
    """The content of a real model file, with `row` in the place of its layer 10, an attention."""
    (file,) = Path(ultralytics.__file__).parent.glob(f"cfg/models/11/{name}")
    content = read_yaml(file.read_text())
    assert content["backbone"][10][2] == "C2PSA"
    content["backbone"][10] = row
    return content


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("data", "tasks")
def test_a_line_in_the_file_of_a_real_model_is_trained_saved_and_loaded(run_example, ultralytics, tmp_path):
    content = real_model(ultralytics, [-1, 1, "PolyNL", []])
    (tmp_path / "yolo11n-poly.yaml").write_text(write_yaml(content))
    example = run_example("ultralytics", "integrations.md")
    block = example["best"].model.model[10]
    assert block.channels == 256  # of 1024 at the scale n
    assert block.beta != 0
    calls = []
    block.register_forward_hook(lambda *_: calls.append(1))
    example["best"].predict(torch.zeros(1, 3, 32, 32), verbose=False)
    assert calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", polynl.BLOCKS)
def test_every_block_is_a_line(name, tasks):
    kind = polynl.BLOCKS[name].block
    row = [-1, 2, kind.__name__, [{"init": "random"}]]
    content = {"nc": 1, "backbone": [[-1, 1, "Conv", [8, 3, 2]], row], "head": [[[1], 1, "Detect", ["nc"]]]}
    model = tasks.DetectionModel(content, verbose=False)
    assert [type(block) for block in model.model[1]] == [kind, kind]
    assert {(block.channels, block.init) for block in model.model[1]} == {(8, "random")}
    assert model.model[1].np == sum(parameter.numel() for parameter in model.model[1].parameters())
    assert content["backbone"][1] == row


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("tasks")
def test_every_block_is_exported_to_onnx(ultralytics, tmp_path, monkeypatch):
    """Each block is a level of its own, so that the detector's output has those of all blocks in turn."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    pytest.importorskip("onnx", reason="needs the extra 'export'")
    rows = [[0, 1, row.block.__name__, [{"init": "random"}]] for row in polynl.BLOCKS.values()]
    levels = [*range(1, len(rows) + 1)]
    content = {
        "nc": 1,
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], *rows],
        "head": [[levels, 1, "Detect", ["nc"]]],
    }
    monkeypatch.chdir(tmp_path)  # where ultralytics writes
    (tmp_path / "blocks.yaml").write_text(write_yaml(content))
    torch.manual_seed(0)
    yolo = ultralytics.YOLO(tmp_path / "blocks.yaml")
    with torch.no_grad():
        for head in yolo.model.model[-1].cv3:  # its bias makes all scores nearly 0 at the start
            head[-1].weight.normal_(std=3)
            head[-1].bias.zero_()
    file = yolo.export(format="onnx", imgsz=32, dynamic=True, simplify=False)
    x = torch.rand(2, 3, 64, 32)
    with torch.no_grad():
        expected = yolo.model.eval()(x)[0].unflatten(-1, (len(levels), -1))
    (output,) = onnxruntime.InferenceSession(file).run(None, {"images": x.numpy()})
    for level, name in enumerate(polynl.BLOCKS):
        (boxes, scores), (found_boxes, found_scores) = (
            t[:, :, level].split((4, 1), dim=1)
            for t in (expected, torch.from_numpy(output).view_as(expected))
        )
        assert scores.std() > 1e-3, f"{name}: scores that are alike would show little"
        torch.testing.assert_close(found_boxes, boxes, rtol=0, atol=1e-3, msg=name)
        torch.testing.assert_close(found_scores, scores, rtol=0, atol=1e-5, msg=name)


@pytest.mark.filterwarnings("ignore")
def test_the_number_of_channels_follows_the_scale(tasks, ultralytics):
    for scale, channels in (("n", 256), ("s", 512)):
        content = {**real_model(ultralytics, [-1, 1, "PolyNL", []]), "scale": scale}
        assert tasks.DetectionModel(content, verbose=False).model[10].channels == channels


@pytest.mark.filterwarnings("ignore")
def test_a_classifier(tasks, ultralytics):
    """Its model runs no image when it is built, so channels have to be known without."""
    (file,) = Path(ultralytics.__file__).parent.glob("cfg/models/11/yolo11-cls.yaml")
    content = {**read_yaml(file.read_text()), "scale": "n"}
    content["backbone"][9] = [-1, 1, "PolyNL", [{"reduction": 2}]]
    block = tasks.ClassificationModel(content, verbose=False).model[9]
    assert (type(block), block.channels, block.reduction) == (polynl.PolyNL, 256, 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "error", "said"),
    [
        ([-1, 1, "PolyNL", [64]], ValueError, r"layer 1: PolyNL has the arguments \[64\]: expected \[\]"),
        ([[-1, 0], 1, "PolyNL", []], ValueError, r"layer 1: PolyNL takes the output of one layer"),
        ([-1, 1, "PolyNL", [{"reduktion": 2}]], TypeError, "reduktion"),
    ],
)
def test_a_wrong_line(row, error, said, tasks):
    content = {"nc": 1, "backbone": [[-1, 1, "Conv", [8, 3, 2]], row], "head": [[[1], 1, "Detect", ["nc"]]]}
    with pytest.raises(error, match=said):
        tasks.DetectionModel(content, verbose=False)
