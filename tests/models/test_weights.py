"""Files of weights that are damaged or no weights: a ValueError of one line, and the model as it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from polynl.errors import SettingsError
from polynl.insertion import insert
from polynl.models.resnet import ClassifierConfig, resnet
from polynl.models.weights import damaged_entry, load_weights


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 30)


def save(layer: nn.Module, path: Path) -> bytes:
    state = layer.state_dict()
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=path.suffix != ".legacy")
    return path.read_bytes()


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "w.legacy"])
def test_a_whole_file_is_loaded(tmp_path: Path, layer: nn.Linear, name: str) -> None:
    save(layer, tmp_path / name)
    other = nn.Linear(40, 30)
    load_weights(other, tmp_path / name)
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "w.legacy"])
@pytest.mark.parametrize("part", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_a_file_cut_short(tmp_path: Path, layer: nn.Linear, name: str, part: float) -> None:
    content = save(layer, tmp_path / name)
    (tmp_path / name).write_bytes(content[: int(part * len(content))])
    before = layer.weight.clone()
    with pytest.raises(ValueError, match=f"{name}' is ") as caught:
        load_weights(layer, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (math.nan, torch.float32),
        (-math.inf, torch.float32),
        (math.inf, torch.float16),
        (math.nan, torch.float8_e4m3fn),
    ],
)
def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, layer: nn.Linear, name: str, value: float, dtype: torch.dtype
) -> None:
    other = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    other[0].weight.data[7, 9] = value
    # Large values add up to infinity in 16 bits, and are finite.
    other[1].running_var.fill_(60000 if dtype == torch.float16 else 1)
    save(other.to(dtype), tmp_path / name)
    model = nn.Sequential(layer, nn.BatchNorm1d(30))
    before = layer.weight.clone()
    message = rf"{name}' has NaN or infinite values in 1 of its 7 tensors, first in 0\.weight"
    with pytest.raises(ValueError, match=message):
        load_weights(model, tmp_path / name)
    assert torch.equal(layer.weight, before)
    load_weights(model, tmp_path / name, without=["0"])


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\x00" * 100, b"\x80\x02}q\x00.", b"PK\x03\x04", b"(((("]
)
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_file_of_something_else(tmp_path: Path, layer: nn.Linear, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as caught:
        load_weights(layer, tmp_path / name)
    assert str(caught.value).count("\n") <= 3


def test_a_missing_file_is_a_missing_file(tmp_path: Path, layer: nn.Linear) -> None:
    for name in ("w.pth", "w.safetensors"):
        with pytest.raises(FileNotFoundError):
            load_weights(layer, tmp_path / name)


@pytest.mark.parametrize("wrapped", [{}, {"format": "of others"}])
def test_checkpoints_of_others_need_no_sums(
    tmp_path: Path, layer: nn.Linear, wrapped: dict[str, Any]
) -> None:
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"model": layer.state_dict(), **wrapped}, tmp_path / "w.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    other = nn.Linear(40, 30)
    load_weights(other, tmp_path / "w.pth")
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_checkpoints_of_other_programs(tmp_path: Path, layer: nn.Linear, key: str, prefix: str) -> None:
    state = {f"{prefix}{name}": value + 1 for name, value in layer.state_dict().items()}
    torch.save({key: state, "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "checkpoint.pth")
    expected = layer.weight.detach() + 1
    load_weights(layer, tmp_path / "checkpoint.pth")
    assert torch.equal(layer.weight, expected)


@pytest.mark.parametrize(("of", "used"), [("resnet34", "resnet50"), ("resnext50_32x4d", "resnet50")])
def test_weights_of_another_resnet_are_recognised(tmp_path: Path, of: str, used: str) -> None:
    torch.save(resnet(of, num_classes=3).state_dict(), tmp_path / "weights.pth")
    config = ClassifierConfig(arch=used, weights=tmp_path / "weights.pth")
    with pytest.raises(SettingsError, match=rf"It has the weights of {of}: set arch to it"):
        config.check(4)


def test_damage_is_found_in_bytes_and_in_the_mark_of_a_folder(tmp_path: Path, layer: nn.Linear) -> None:
    content, path = save(layer, tmp_path / "w.pth"), tmp_path / "w.pth"
    assert damaged_entry(path) is None
    weight = content.index(layer.weight.detach().numpy().tobytes())
    mark = content.index(b"data/0", content.index(b"PK\x01\x02")) - len("w/") - 46 + 38
    for place in (weight + 5, mark):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        assert damaged_entry(path) == "w/data/0"


def test_a_trained_model_has_its_block(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 1))
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    model = insert(nn.Sequential(nn.Conv2d(3, 8, 1)), "poly_nl", after="0")
    load_weights(model, tmp_path / "plain.pth")
    with pytest.raises(ValueError, match=r"missing: 0\.polynl_after\.alpha"):
        load_weights(model, tmp_path / "plain.pth", trained=True)


def test_files_in_which_scales_have_no_axis(tmp_path: Path) -> None:
    model = insert(nn.Sequential(nn.Conv2d(3, 8, 1)), "poly_nl", after="0")
    older = {key: value + 1 for key, value in model.state_dict().items()}
    older = {key: value.reshape(()) if value.shape == (1,) else value for key, value in older.items()}
    torch.save(older, tmp_path / "older.pth")
    load_weights(model, tmp_path / "older.pth")
    assert all(torch.equal(value, older[key].view_as(value)) for key, value in model.state_dict().items())


@pytest.mark.parametrize("state", [{0: torch.ones(1)}, {"weight": torch.ones(2, device="meta")}], ids=str)
def test_keys_and_tensors_that_are_no_weights(tmp_path: Path, layer: nn.Linear, state: dict) -> None:
    torch.save(state, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match=r"odd\.pth' must contain a state dict"):
        load_weights(layer, tmp_path / "odd.pth")


def test_values_that_are_not_finite_in_the_dtype_of_the_model(tmp_path: Path, layer: nn.Linear) -> None:
    state = {key: value.double() for key, value in layer.state_dict().items()}
    state["bias"][0] = 1e300
    torch.save(state, tmp_path / "large.pth")
    with pytest.raises(ValueError, match=r"large\.pth' has NaN or infinite values .* first in bias"):
        load_weights(layer, tmp_path / "large.pth")
