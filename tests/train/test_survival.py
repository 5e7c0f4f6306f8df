"""A run that is stopped, killed, or finds its disk full goes on as if nothing had happened."""

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
from real_runs import (
    STEPS,
    Gate,
    Runner,
    copied,
    half_written,
    make_images,
    outcome,
    write_recipe,
)
from small_runs import run

from polynl.tasks.classification import Classification
from polynl.train import interruption
from polynl.train.checkpoint import load_checkpoint
from polynl.train.interruption import Interruption

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="named pipes, /proc and resource limits")
KILLED = -signal.SIGKILL


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.clean_up()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def recipe(images: Path) -> Path:
    return write_recipe(images.parent / "recipe.yaml", images)


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    runner = Runner(folder)
    finished = runner.polynl("train", recipe, "--out", folder / "run")
    assert finished.wait() == 0, finished.said
    return folder / "run"


@pytest.fixture(scope="module")
def stopped(recipe: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped in its second epoch: last.pt is of its third step, previous.pt of the epoch before."""
    folder = tmp_path_factory.mktemp("stopped")
    runner, gated = Runner(folder), copied(images, folder / "images")
    gate = Gate.at_step(gated, epoch=1, step=2)
    begun = runner.polynl("train", recipe, "--out", folder / "run", "--data.root", gated)
    gate.wait(begun, epoch=1)
    begun.send(signal.SIGTERM)
    gate.open()
    assert begun.wait() == 128 + signal.SIGTERM, begun.said
    return folder / "run"


def at(checkpoint: Path) -> tuple[int, int]:
    """Epochs and steps done."""
    state = load_checkpoint(checkpoint)
    return state["epoch"], state["step"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_short(message: str, lines: int = 3) -> None:
    assert len(message.splitlines()) <= lines, message
    assert "Traceback" not in message, message


# Signals


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_stopped_again_and_again_ends_as_if_it_never_was(
    workers: int, runner: Runner, recipe: Path, images: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["train", recipe, "--out", out]
    moments = [
        (signal.SIGTERM, Gate.at_step(copied(images, tmp_path / "1"), epoch=0, step=2), (0, 3)),
        (signal.SIGHUP, Gate.in_scoring(copied(images, tmp_path / "2")), (0, STEPS)),
        (signal.SIGINT, Gate.at_step(copied(images, tmp_path / "3"), epoch=1, step=3), (1, 4)),
    ]
    for number, (kind, gate, moment) in enumerate(moments, start=1):
        keys = ["--workers", workers, "--data.root", tmp_path / str(number), "--resume"]
        # The first time as a user does it.
        start = runner.polynl if number > 1 or workers else lambda *w: runner.command("-m", "polynl", *w)
        begun = start(*words, *keys)
        gate.wait(begun)
        begun.send(kind, to_group=True)
        gate.open()
        assert begun.wait() == 128 + kind, begun.said
        assert f"stopped by {kind.name}. The last good checkpoint is {out}/last.pt" in begun.complaints
        assert "Go on with --resume." in begun.complaints
        assert_short(begun.complaints)
        assert half_written(out) == []
        if workers == 0:  # which read ahead
            assert at(out / "last.pt") == moment
            assert f"after step {moment[1]} of epoch {moment[0] + 1}" in begun.complaints
    # How images are read and how often the state is saved makes no difference.
    resumed = runner.polynl(*words, "--resume", "--workers", 2 - workers, "--checkpoint-every", 1)
    assert resumed.wait() == 0, resumed.said
    assert outcome(out) == outcome(undisturbed)
    again = runner.polynl(*words, "--resume")
    assert again.wait() == 0, again.said
    assert "2 epochs trained in" in again.said
    assert outcome(out) == outcome(undisturbed)


def test_a_signal_that_is_passed_on_counts_once_and_a_later_one_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with handled(signal.SIGINT, signal.default_int_handler), Interruption() as interrupted:
        assert not interrupted.requested
        for _ in range(3):  # `timeout`, torchrun and others send what their group has got already
            signal.raise_signal(signal.SIGINT)
        assert interrupted.signal == signal.SIGINT
        monkeypatch.setattr(interruption, "AGAIN", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_was_to_be_ignored_stays_ignored() -> None:
    with handled(signal.SIGHUP, signal.SIG_IGN):  # as `nohup` does
        with Interruption() as interrupted:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupted.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


# kill -9


def test_a_run_killed_again_and_again_ends_as_if_it_never_was(
    runner: Runner, recipe: Path, images: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["train", recipe, "--out", out]
    moments = [
        (2, Gate.at_step(copied(images, tmp_path / "1"), epoch=0, step=0), None),
        (0, Gate.at_step(copied(images, tmp_path / "2"), epoch=0, step=5), (0, 4)),
        (0, Gate.at_step(copied(images, tmp_path / "3"), epoch=1, step=2), (1, 0)),
        (2, Gate.in_scoring(copied(images, tmp_path / "4")), (1, 4)),
    ]
    for number, (workers, gate, kept) in enumerate(moments, start=1):
        keys = ["--workers", workers, "--data.root", tmp_path / str(number)]
        begun = runner.polynl(*words, *keys, "--resume")
        gate.wait(begun)
        second = runner.polynl(*words, "--overwrite" if number % 2 else "--resume")
        assert second.wait() == 2
        assert f"another process is training in {out}" in second.complaints
        assert_short(second.complaints)
        begun.send(signal.SIGKILL)
        # From here on the folder is free, though processes that read images are still there.
        assert begun.wait() == KILLED
        assert (at(out / "last.pt") if kept else (out / "last.pt").exists()) == (kept or False)
    resumed = runner.polynl(*words, "--resume")
    assert resumed.wait() == 0, resumed.said
    assert outcome(out) == outcome(undisturbed)


def test_a_run_killed_while_it_writes_ends_as_if_it_never_was(
    runner: Runner, recipe: Path, stopped: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Before each of the files that it names from the third step of the last epoch on."""
    for moment in range(1, 100):
        out = copied(stopped, tmp_path / str(moment))
        words = ["train", recipe, "--out", out, "--resume"]
        killed = runner.polynl(*words, dies_at=moment)
        if killed.wait() == 0:
            break
        assert killed.wait() == KILLED, killed.said
        resumed = runner.polynl(*words)
        assert resumed.wait() == 0, (moment, resumed.said)
        assert outcome(out) == outcome(undisturbed), moment
        assert at(out / "last.pt") == at(undisturbed / "last.pt")
        assert at(out / "best.pt") == at(undisturbed / "best.pt")
        assert half_written(out) == []
    assert moment > 10, "there were checkpoints to write"


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
    assert "No checkpoint of this run can be read." in err
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
    assert "Make room, then go on with --resume." in complaints
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
    assert "no finite loss at step 3 of epoch 2: cross_entropy nan." in err
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
    assert (code, "no finite loss at step 2 of epoch 1" in err) == (1, True)
    assert_short(err)
    assert at(tmp_path / "last.pt") == (0, 1)
    assert all(value.isfinite().all() for value in load_checkpoint(tmp_path / "last.pt")["model"].values())


def test_weights_that_are_no_numbers_are_not_saved(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    """A step can make them of a loss that is a number; the next loss would tell too late."""
    keys = ["--optimizer.lr", "1e38", "--optimizer.weight-decay", "1000", "--checkpoint-every", "1"]
    code, _, err = run(capsys, "train", recipe, "--out", tmp_path, *keys)
    assert code == 1
    assert "weights that are not finite after step 1 of epoch 1. There is no checkpoint yet." in err
    assert_short(err)
    assert not (tmp_path / "last.pt").exists()


# What is not to be replaced


def test_a_run_is_replaced_only_by_one_that_can_begin(
    stopped: Path, recipe: Path, undisturbed: Path, tmp_path: Path, capsys: Any
) -> None:
    out = copied(stopped, tmp_path / "run")
    before = contents(out)
    code, _, err = run(capsys, "train", recipe, "--out", out, "--overwrite", "--batch", "26")
    assert (code, "batch: a step takes 26 images" in err) == (2, True)
    assert contents(out) == before
    assert run(capsys, "train", recipe, "--out", out, "--overwrite")[0] == 0
    assert outcome(out) == outcome(undisturbed)


def test_a_run_does_not_go_on_with_other_images_or_another_network(
    stopped: Path, recipe: Path, images: Path, tmp_path: Path, capsys: Any
) -> None:
    out, fewer = copied(stopped, tmp_path / "run"), copied(images, tmp_path / "images")
    next((fewer / "train").rglob("*.png")).unlink()
    before = contents(out)
    code, _, err = run(capsys, "train", recipe, "--out", out, "--resume", "--data.root", fewer)
    assert code == 2
    assert "was begun with 25 images to train on, and now there are 24" in err
    assert contents(out) == before
    state = load_checkpoint(out / "last.pt")
    state["model"]["fc.bias"] = torch.zeros(7)
    torch.save(state, out / "last.pt")
    code, _, err = run(capsys, "train", recipe, "--out", out, "--resume")
    assert code == 2
    assert "the checkpoint does not fit the recipe" in err
    assert_short(err, lines=4)


def test_files_of_others_are_left_alone(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    mine = tmp_path / "tensorboard" / "events"
    mine.parent.mkdir()
    mine.write_text("of another program")
    assert run(capsys, "train", recipe, "--out", tmp_path, "--epochs", "1")[0] == 0
    assert mine.read_text() == "of another program"
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "best.pt").write_text("of another program")
    assert run(capsys, "train", recipe, "--out", tmp_path / "weights")[0] == 2
    assert (tmp_path / "weights" / "best.pt").read_text() == "of another program"


def test_the_seed_makes_the_run(recipe: Path, undisturbed: Path, tmp_path: Path, capsys: Any) -> None:
    for seed in ("0", "1"):
        assert run(capsys, "train", recipe, "--out", tmp_path / seed, "--resume", "--seed", seed)[0] == 0
    assert outcome(tmp_path / "0") == outcome(undisturbed)
    assert all(a != b for a, b in zip(outcome(tmp_path / "0"), outcome(tmp_path / "1"), strict=True))
