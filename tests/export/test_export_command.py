"""`polynl export`, and the programs of docs/deploy.md."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from networks import randomised
from PIL import Image
from safetensors.torch import save_file

import polynl
from polynl.models.weights import load_weights
from polynl.train.recipe_file import load_recipe, to_yaml

TESTS = Path(__file__).parents[1]
TINY = TESTS / "train" / "tiny.yaml"
NAMES = ["ant", "bee", "cat", "dog", "eel", "fox"]
pytestmark = pytest.mark.filterwarnings("ignore")


def make_run(folder: Path, recipe: Path, labels: dict[int, str]) -> Path:
    """A run with random weights."""
    task = load_recipe(recipe).build_task(labels)
    save_file(randomised(task.model()).state_dict(), folder / "best.safetensors")
    (folder / "recipe.yaml").write_text(to_yaml(load_recipe(recipe)))
    (folder / "labels.json").write_text(json.dumps(labels))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), TINY, dict(enumerate(NAMES)))


def test_the_network_of_a_run(folder: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "export", folder, "--to", "torch", "--dynamic", "batch=4", "height", "width")
    assert (code, err) == (0, "")
    assert re.search(r"torch.export differs from PyTorch by at most \S+ of the largest output", out)
    assert "at 3×3×20×12, 1×3×16×16, 2×3×12×20." in out
    assert re.search(r"Latency at 1×3×16×16: \S+ ms in torch.export, \S+ ms in PyTorch, 1 thread\.", out)
    about = json.loads((folder / "model.pt2.json").read_text())
    assert about["labels"] == {str(number): name for number, name in enumerate(NAMES)}
    assert about["preprocessing"] == {"size": 16, "mean": [0.3] * 3, "std": [0.25] * 3}
    assert about["dynamic"] == {"batch": 4, "height": None, "width": None}
    task = load_recipe(TINY).build_task(dict(enumerate(NAMES)))
    model = task.model().eval()
    load_weights(model, folder / "best.safetensors", trained=True)
    x = torch.randn(4, 3, 30, 18)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(folder / "model.pt2").module()(x), model(x))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dynamic", "height=no"], "--dynamic height=no: expected height=SIZE, with the largest size."),
        (["--dynamic", "hight"], "no axis is called 'hight'. Did you mean height"),
        (["--out", "m.onnx"], "m.onnx must end in .pt2, since it is for torch.export."),
        (["--out", f"{TINY}/m.pt2"], "m.pt2 cannot be written: "),
        (["--out", str(TESTS / "train")], "train is a folder; expected a file."),
        (["--module", "layer33"], "--module: the network has no module 'layer33'. Did you mean layer3"),
        (["--size", "0"], "--size 0: expected a number above 0."),
        (["--model.blok", "none"], "blok: there is no such key"),
    ],
)
def test_mistakes_are_named(folder: Path, capsys: Any, words: list[str], message: str) -> None:
    code, _, err = run(capsys, "export", folder, "--to", "torch", *words)
    assert code == 2
    assert message in err


def test_a_run_that_is_not_there(capsys: Any) -> None:
    code, _, err = run(capsys, "export", "nowhere", "--to", "torch")
    assert (code, err) == (2, "polynl: no such run or checkpoint: nowhere.\n")


def test_a_wrong_export_ends_with_one_line(folder: Path, capsys: Any, tmp_path: Path) -> None:
    code, _, err = run(
        capsys, "export", folder, "--to", "torch", "--tolerance", "-1", "--out", tmp_path / "m.pt2"
    )
    assert code == 1
    assert err.startswith("polynl: torch.export differs from PyTorch by ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_detector_is_exported_by_module(tmp_path: Path, capsys: Any) -> None:
    labels = load_recipe(TESTS / "tiny_faces.yaml").build_task(None).labels()
    detector = make_run(tmp_path, TESTS / "tiny_faces.yaml", labels)
    code, _, err = run(capsys, "export", detector, "--to", "torch")
    assert code == 2
    assert "a detector cannot be exported as a whole" in err
    assert err.count("\n") == 1
    code, out, _ = run(capsys, "export", detector, "--to", "torch", "--module", "backbone", "--size", "64")
    assert code == 0
    assert "with three inputs 1×3×64×64" in out
    about = json.loads((detector / "model.pt2.json").read_text())
    transform = polynl.load_run(detector).model.transform
    assert about["preprocessing"] == {
        "min_size": transform.min_size[-1],
        "max_size": transform.max_size,
        "mean": list(transform.image_mean),
        "std": list(transform.image_std),
    }


def test_a_missing_runtime_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else found(name))
    monkeypatch.setattr("polynl.extras.extras", lambda: {"openvino": "export"})
    with pytest.raises(ModuleNotFoundError, match=r'pip install "polynl\[export\]"') as error:
        run(capsys, "export", folder, "--to", "openvino")
    assert error.value.name == "openvino"
    assert "\n" not in str(error.value)


def test_the_int8_example(run_example: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    from networks import small_network

    model = small_network()
    polynl.export.to_onnx(model, tmp_path / "model.onnx", torch.randn(1, 3, 32, 32))
    images = run_example("onnxruntime", "deploy.md")["images"]
    session = onnxruntime.InferenceSession(tmp_path / "model.int8.onnx")
    (output,) = session.run(None, {"input": images[:1].numpy()})
    with torch.no_grad():
        expected = model(images[:1])
    error = float((torch.from_numpy(output) - expected).norm() / expected.norm())
    assert 0 < error < 0.2


def test_the_web_service(folder: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    page = (TESTS.parent / "docs" / "deploy.md").read_text()
    (code,) = re.findall(r"^```python service\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line]) <= 20
    (tmp_path / "service.py").write_text(code)
    assert run(capsys, "export", folder, "--to", "onnx", "--out", tmp_path / "model.onnx")[0] == 0
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "png")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, tmp_path / "service.py", tmp_path / "model.onnx", str(port)]
    service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        answer = ask(service, port, png.getvalue())
    finally:
        service.terminate()
        service.communicate()
    task = load_recipe(TINY).build_task(dict(enumerate(NAMES)))
    model = task.model().eval()
    load_weights(model, folder / "best.safetensors", trained=True)
    with torch.no_grad():
        (logits,) = model(task.inputs(torch.from_numpy(pixels).permute(2, 0, 1)))
    assert answer["class"] == NAMES[int(logits.argmax())]
    assert answer["logits"] == pytest.approx(logits.tolist(), rel=1e-4, abs=1e-4)


def ask(service: subprocess.Popen[str], port: int, image: bytes) -> Any:
    """Its answer, as soon as it listens."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://localhost:{port}", image, timeout=60) as answer:
                return json.load(answer)
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
        assert service.poll() is None, service.stderr.read() if service.stderr else ""
        time.sleep(0.1)
    raise AssertionError("the service does not answer")
