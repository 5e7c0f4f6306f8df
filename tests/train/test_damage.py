"""A damaged checkpoint, a full disk or a NaN loss stops a run without losing its progress."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from real_runs import (
    CLASSES,
    STEPS,
    Gate,
    Runner,
    assert_short,
    at,
    contents,
    copied,
    half_written,
    outcome,
)
from safetensors.torch import load_file, save_file

from polynl.tasks.classification.task import Classification
from polynl.train.checkpoint import FORMAT, load_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="named pipes, /proc and resource limits")
KILLED = -signal.SIGKILL


# Damage


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


def damaged(kind: str, file: Path, trap: Path) -> None:
    content = file.read_bytes()
    if kind == "pickle that runs code":
        file.write_bytes(pickle.dumps({"model": Evil(trap)}))
    elif kind == "torch file that runs code":
        torch.save({**load_checkpoint(file), "more": Evil(trap)}, file)
    elif kind == "format and nothing else":
        torch.save({"format": FORMAT}, file)
    elif kind == "NaN in the weights":
        state = load_checkpoint(file)
        state["model"]["conv1.weight"][0, 0, 0, 0] = math.nan
        torch.save(state, file)
    elif kind == "state dict":
        torch.save(load_checkpoint(file)["model"], file)
    elif kind == "garbage":
        file.write_bytes(bytes(byte ^ 0x5A for byte in content))
    elif kind == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: {"empty": 0, "half": len(content) // 2, "all but a byte": -1}[kind]])


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "half",
        "all but a byte",
        "garbage",
        "state dict",
        "format and nothing else",
        "NaN in the weights",
        "pickle that runs code",
        "torch file that runs code",
        "gone",
    ],
)
def test_with_a_damaged_checkpoint_the_one_before_is_used(
    kind: str, recipe: Path, stopped: Path, undisturbed: Path, tmp_path: Path, capsys: Any
) -> None:
    out, trap = copied(stopped, tmp_path / "run"), tmp_path / "trap"
    damaged(kind, out / "last.pt", trap)
    code, said, _ = run(capsys, "train", recipe, "--out", out, "--resume")
    assert code == 0
    assert (f"{out}/last.pt" in said.replace("\n", "")) == (kind != "gone")
    assert not trap.exists()
    assert outcome(out) == outcome(undisturbed)


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_one_before(
    runner: Runner, recipe: Path, stopped: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Whenever the run that has found it is killed."""
    out = copied(stopped, tmp_path / "run")
    damaged("half", out / "last.pt", tmp_path / "trap")
    words = ["train", recipe, "--out", out, "--resume"]
    for moment in range(1, 9):
        killed = runner.polynl(*words, dies_at=moment)
        assert killed.wait() == KILLED, killed.said
    resumed = runner.polynl(*words)
    assert resumed.wait() == 0, resumed.said
    assert outcome(out) == outcome(undisturbed)


def test_without_a_checkpoint_that_can_be_read_nothing_is_touched(
    recipe: Path, stopped: Path, tmp_path: Path, capsys: Any
) -> None:
    out = copied(stopped, tmp_path / "run")
    damaged("half", out / "last.pt", tmp_path / "trap")
    damaged("garbage", out / "previous.pt", tmp_path / "trap")
    before = contents(out)
    code, said, err = run(capsys, "train", recipe, "--out", out, "--resume")
    assert (code, said) == (2, "")
    assert f"{out}/last.pt is damaged" in err
    assert f"{out}/previous.pt is damaged" in err
    assert f"To continue after epoch 1: cp {out}/best.pt {out}/last.pt, then --resume." in err
    assert_short(err)
    assert contents(out) == before


def test_a_run_without_its_recipe_is_not_resumed_and_a_way_on_is_named(
    recipe: Path, stopped: Path, tmp_path: Path, capsys: Any
) -> None:
    out = copied(stopped, tmp_path / "run")
    (out / "recipe.yaml").write_bytes(b"")
    before = contents(out)
    code, said, err = run(capsys, "train", recipe, "--out", out, "--resume")
    assert (code, said) == (2, "")
    assert f"{out}/recipe.yaml is not a recipe: expected keys and values, got nothing." in err
    assert f"start the command in {out}/environment.json with another --out" in err
    assert_short(err)
    assert contents(out) == before


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


def assert_stopped_by_a_full_disk(code: int, complaints: str, out: Path) -> None:
    assert code == 1
    assert f"{out} cannot be written to: " in complaints
    assert f"The last good checkpoint is {out}/last.pt, after epoch 1." in complaints
    assert "Make room, then continue with --resume." in complaints
    assert_short(complaints)
    assert half_written(out) == []
    assert at(out / "last.pt") == (1, 0)


def test_a_full_disk_stops_a_run_and_costs_nothing(
    small_disk: Path,
    runner: Runner,
    recipe: Path,
    images: Path,
    undisturbed: Path,
    tmp_path: Path,
    capsys: Any,
) -> None:
    out, gated = small_disk / "run", copied(images, tmp_path / "images")
    gate = Gate.at_step(gated, epoch=1, step=2)
    begun = runner.polynl("train", recipe, "--out", out, "--data.root", gated)
    gate.wait(begun, epoch=1)
    filler = fill(small_disk)
    gate.open()
    assert_stopped_by_a_full_disk(begun.wait(), begun.complaints, out)
    assert "No space left on device" in begun.complaints
    code, _, err = run(capsys, "train", recipe, "--out", small_disk / "another")
    assert code == 1
    assert "No space left on device. There is no checkpoint yet." in err
    assert_short(err)
    filler.unlink()
    assert run(capsys, "train", recipe, "--out", out, "--resume")[0] == 0
    assert outcome(out) == outcome(undisturbed)


def test_a_file_that_may_not_grow_stops_a_run_and_costs_nothing(
    runner: Runner, recipe: Path, images: Path, undisturbed: Path, tmp_path: Path, capsys: Any
) -> None:
    out, gated = tmp_path / "run", copied(images, tmp_path / "images")
    gate = Gate.at_step(gated, epoch=1, step=2)
    begun = runner.polynl("train", recipe, "--out", out, "--data.root", gated)
    gate.wait(begun, epoch=1)
    # TensorBoard's file is longer already: its thread fails before the checkpoint does.
    resource.prlimit(begun.pid, resource.RLIMIT_FSIZE, (1024, 1024))
    gate.open()
    assert_stopped_by_a_full_disk(begun.wait(), begun.complaints, out)
    assert "File too large" in begun.complaints
    assert run(capsys, "train", recipe, "--out", out, "--resume")[0] == 0
    assert outcome(out) == outcome(undisturbed)


# Numbers that are none


def test_a_loss_that_is_no_number_stops_a_run_and_costs_nothing(
    recipe: Path, undisturbed: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, calls = Classification.losses, []

    def exploding(*arguments: Any) -> Any:
        calls.append(arguments)
        found = losses(*arguments)
        return {name: loss * math.nan for name, loss in found.items()} if len(calls) == STEPS + 3 else found

    monkeypatch.setattr(Classification, "losses", exploding)
    words = ["train", recipe, "--out", tmp_path / "run", "--checkpoint-every", "1"]
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "the loss is not finite at step 3 of epoch 2: cross_entropy nan." in err
    assert f"The last good checkpoint is {tmp_path}/run/last.pt, after step 2 of epoch 2." in err
    assert_short(err)
    monkeypatch.undo()
    assert run(capsys, *words, "--resume")[0] == 0
    assert outcome(tmp_path / "run") == outcome(undisturbed)


def test_the_last_checkpoint_before_a_loss_that_is_no_number_is_good(
    recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["train", recipe, "--out", tmp_path, "--checkpoint-every", "1", "--optimizer.lr", "1e30"]
    code, _, err = run(capsys, *words)
    assert (code, "the loss is not finite at step 2 of epoch 1" in err) == (1, True)
    assert_short(err)
    assert at(tmp_path / "last.pt") == (0, 1)
    assert all(value.isfinite().all() for value in load_checkpoint(tmp_path / "last.pt")["model"].values())


def test_weights_that_are_no_numbers_are_not_saved(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    """A step can produce them from a finite loss; the next loss would show it too late."""
    keys = ["--optimizer.lr", "1e38", "--optimizer.weight-decay", "1000", "--checkpoint-every", "1"]
    code, _, err = run(capsys, "train", recipe, "--out", tmp_path, *keys)
    assert code == 1
    assert "the weights are not finite after step 1 of epoch 1. There is no checkpoint yet." in err
    assert_short(err)
    assert not (tmp_path / "last.pt").exists()


def test_weights_that_are_no_numbers_are_neither_scored_nor_drawn_nor_trained(
    recipe: Path, images: Path, undisturbed: Path, tmp_path: Path, capsys: Any
) -> None:
    run_folder = copied(undisturbed, tmp_path / "run")
    weights = run_folder / "best.safetensors"
    save_file(load_file(weights) | {"fc.bias": torch.full((CLASSES,), torch.nan)}, weights)
    image = next((images / "val").rglob("*.png"))
    for words in (
        ["evaluate", recipe, "--checkpoint", weights],
        ["explain", image, "--checkpoint", weights, "--out", tmp_path / "pictures"],
        ["train", recipe, "--model.weights", weights, "--out", tmp_path / "new"],
    ):
        code, said, err = run(capsys, *words)
        assert (code, said) == (2, ""), words
        assert f"'{weights}' has NaN or infinite values in 1 of its" in err
        assert "first in fc.bias" in err
        assert_short(err)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    code, said, _ = run(capsys, "report", run_folder, "--out", tmp_path / "report.html")
    assert code == 0, "its scores are good"
    assert f"No pictures: no block: --checkpoint: '{weights}' has NaN or infinite values" in said
