"""Checkpoints: round trip, detection of damage, and no execution of code in a file."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polynl.models.about import About
from polynl.models.resnet import resnet
from polynl.models.weights import load_weights
from polynl.train.checkpoint import (
    BEST,
    FORMAT,
    LAST,
    PREVIOUS,
    CheckpointError,
    export_weights,
    load_checkpoint,
    load_last,
    save_checkpoint,
)


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, whatever is nested in it."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def some_state(number: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "images": 8,
        "batch": 2,
        "epoch": 1,
        "step": number,
        "rows": [{"epoch": 1, "loss": 0.1 + number, "top1": 1 / 3}, {}],
        "model": {"weight": torch.randn(4, 3, generator=generator), "count": torch.tensor(7)},
        "optimizer": {},
        "scaler": {},
        "shares": [{"random": {}, "totals": {}}],
    }


@pytest.fixture
def saved(tmp_path: Path) -> bytes:
    save_checkpoint(tmp_path, some_state())
    return (tmp_path / LAST).read_bytes()


def test_tensors_and_values_come_back_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = resnet("small_resnet", block="poly_nl", arch_options={"width": 4}, num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    state = some_state() | {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "odd": [float("inf"), -0.0, 10**20, True, None, "ü", (1, 2.5)],
        "tensors": [torch.tensor(float("nan")), torch.zeros(0, 3), torch.tensor([1.5]).half()],
        "strided": torch.arange(12).reshape(3, 4).t(),
    }
    save_checkpoint(tmp_path, state)
    loaded = load_checkpoint(tmp_path / LAST)
    assert loaded.pop("format") == FORMAT
    assert same(loaded, state)


def test_the_one_before_is_kept_and_the_best_beside_it(tmp_path: Path) -> None:
    for number, best in enumerate((False, True, False, False)):
        save_checkpoint(tmp_path, some_state(number), best=best)
    steps = {name: load_checkpoint(tmp_path / name)["step"] for name in (LAST, PREVIOUS, BEST)}
    assert steps == {LAST: 3, PREVIOUS: 2, BEST: 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((LAST, PREVIOUS, BEST))


def test_where_space_is_short_only_the_last_is_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, some_state(step), best=True)
    save_checkpoint(tmp_path, some_state(3), best=True, keep="last")
    assert load_checkpoint(tmp_path / LAST)["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_a_full_disk_costs_neither_of_the_two(tmp_path: Path, monkeypatch: Any) -> None:
    for number in range(2):
        save_checkpoint(tmp_path, some_state(number))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, some_state(2))
    assert load_checkpoint(tmp_path / LAST)["step"] == 1
    assert load_checkpoint(tmp_path / PREVIOUS)["step"] == 0
    assert {path.name for path in tmp_path.iterdir()} == {LAST, PREVIOUS}


# Damage


def changed(content: bytes, place: int, bits: int = 0xFF) -> bytes:
    return content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


def test_a_changed_weight_is_found(tmp_path: Path, saved: bytes) -> None:
    place = saved.index(some_state()["model"]["weight"].numpy().tobytes()) + 17
    (tmp_path / LAST).write_bytes(changed(saved, place, bits=1))
    weight = torch.load(tmp_path / LAST, weights_only=True)["model"]["weight"]
    assert not torch.equal(weight, some_state()["model"]["weight"]), "torch.load finds it by itself by now"
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged: .*data/0 in it has changed\."):
        load_checkpoint(tmp_path / LAST)
    with pytest.raises(ValueError, match=r"damaged .*data/0 in it has changed"):
        load_weights(torch.nn.Linear(3, 4), tmp_path / LAST)


def test_whatever_byte_is_changed_the_state_is_refused_or_whole(tmp_path: Path, saved: bytes) -> None:
    directory = saved.index(b"PK\x01\x02")
    entries = [at for at in range(directory, len(saved)) if saved.startswith(b"PK\x01\x02", at)]
    # Byte 38 of an entry holds the mark of a folder, at which torch.load gives memory as it finds it.
    places = [*range(0, directory, 13), *range(directory, len(saved), 5), *(at + 38 for at in entries)]
    refused = 0
    for place in places:
        (tmp_path / LAST).write_bytes(changed(saved, place))
        try:
            state = load_checkpoint(tmp_path / LAST)
        except CheckpointError:
            refused += 1
        else:
            assert state.pop("format") == FORMAT
            assert same(state, some_state()), f"byte {place}"
    assert refused > len(places) // 3


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_a_file_cut_short_is_found(tmp_path: Path, saved: bytes, part: float) -> None:
    (tmp_path / LAST).write_bytes(saved[: int(part * len(saved))])
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged or not a checkpoint: \S") as caught:
        load_checkpoint(tmp_path / LAST)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gone.pt", "folder.pt"])
def test_there_is_no_such_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(tmp_path / name)


def test_where_the_last_is_damaged_the_one_before_is_taken(tmp_path: Path) -> None:
    assert load_last(tmp_path) == (None, [])
    for number in range(2):
        save_checkpoint(tmp_path, some_state(number))
    state, problems = load_last(tmp_path)
    assert state is not None
    assert (state["step"], problems) == (1, [])
    (tmp_path / LAST).write_bytes(b"")
    state, (problem,) = load_last(tmp_path)
    assert state is not None
    assert state["step"] == 0
    assert LAST in problem
    (tmp_path / LAST).unlink()
    assert load_last(tmp_path)[1] == []
    (tmp_path / PREVIOUS).write_bytes(b"PK")
    (tmp_path / LAST).write_bytes(b"PK")
    with pytest.raises(
        CheckpointError,
        match=r"(?s)last\.pt.*previous\.pt.*No checkpoint of this run can be used: start again with --over",
    ):
        load_last(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict.clear, "is incomplete: it has no images."),
        (lambda state: state.update(rows=3), "is incomplete: it has no rows."),
        (lambda state: state.update(shares=[{}]), "is incomplete: its shares have no random and totals."),
        (lambda state: state["model"].update(count=7), "is damaged: its model has values that are not ten"),
        (
            lambda state: state["model"]["weight"][2:].fill_(torch.inf),
            "has NaN or infinite values in 1 of its 2 tensors, first in weight: the training that wrote",
        ),
    ],
    ids=["nothing", "another type", "a share of nothing", "no tensor", "not finite"],
)
def test_a_state_that_cannot_be_resumed_is_refused_and_the_one_before_is_taken(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    save_checkpoint(tmp_path, some_state(3))
    state = some_state(4)
    change(state)
    save_checkpoint(tmp_path, state)
    found, (problem,) = load_last(tmp_path)
    assert found is not None
    assert found["step"] == 3
    assert problem.startswith(f"{tmp_path / LAST} {message}")


def test_where_only_the_best_is_good_a_command_continues_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    save_checkpoint(folder, some_state(5), best=True)
    for name in (LAST, PREVIOUS):
        (folder / name).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"To continue after epoch 1: cp .*, then --resume\.") as raised:
        load_last(folder)
    command = re.search(r"cp .*(?=, then)", str(raised.value))
    assert command is not None
    subprocess.run(command[0], shell=True, check=True)
    state, problems = load_last(folder)
    assert state is not None
    assert (state["step"], problems) == (5, [])


# Files of others


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


def archive_with(content: bytes, saved: bytes) -> bytes:
    """A checkpoint whose pickle is another one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.infolist():
            ours = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, content if ours else old.read(entry))
    return buffer.getvalue()


def torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["pickle", "torch", "archive", "legacy"])
def test_nothing_in_a_file_is_run(tmp_path: Path, saved: bytes, kind: str) -> None:
    trap = tmp_path / "trap"
    evil = {"format": FORMAT, "model": {}, "evil": Evil(trap)}
    legacy = io.BytesIO()
    torch.save(evil, legacy, _use_new_zipfile_serialization=False)
    content = {
        "pickle": pickle.dumps(evil),
        "torch": torch_saved(evil),
        "archive": archive_with(pickle.dumps(evil), saved),
        "legacy": legacy.getvalue(),
    }[kind]
    (tmp_path / LAST).write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / LAST)
    for name in (LAST, "model.safetensors"):
        with pytest.raises(ValueError, match=name):
            load_weights(torch.nn.Linear(1, 1), tmp_path / name)
    assert not trap.exists()
    if kind in ("pickle", "torch"):
        (pickle.loads if kind == "pickle" else lambda it: torch.load(io.BytesIO(it), weights_only=False))(
            content
        )
        assert trap.exists(), "the trap would not have sprung"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"epoch: 3\n",
        torch_saved({"model": {"weight": torch.zeros(3)}}),
        torch_saved({"format": "another", "model": {}}),
        torch_saved([1, 2]),
        torch_saved(torch.zeros(3)),
    ],
    ids=["empty", "text", "state dict", "another format", "list", "tensor"],
)
def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LAST).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"last\.pt is (not a training checkpoint of|damaged or not a checkpoint)"
    ):
        load_checkpoint(tmp_path / LAST)


def test_exported_weights_are_the_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = resnet("small_resnet", block="poly_nl", arch_options={"width": 4}, num_classes=3)
    model = model.to(memory_format=torch.channels_last)
    model(torch.randn(2, 3, 16, 16))
    export_weights(tmp_path / "best.safetensors", model.state_dict(), About({}))
    exported = load_file(tmp_path / "best.safetensors")
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    assert same(dict(sorted(exported.items())), dict(sorted(state.items())))
