"""A run that is stopped or killed resumes exactly: bit for bit as if undisturbed."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from real_runs import (
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

from polynl.train import processes
from polynl.train.checkpoint import load_checkpoint
from polynl.train.processes import StopRequest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="named pipes, /proc and resource limits")
KILLED = -signal.SIGKILL


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
        assert "Continue with --resume." in begun.complaints
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
    with handled(signal.SIGINT, signal.default_int_handler), StopRequest() as interrupted:
        assert not interrupted.requested
        for _ in range(3):  # `timeout`, torchrun and others send what their group has got already
            signal.raise_signal(signal.SIGINT)
        assert interrupted.signal == signal.SIGINT
        monkeypatch.setattr(processes, "SECOND_SIGNAL_AFTER", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_process_of_torchrun_that_is_ending_is_not_stopped_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first to end makes torchrun stop the others, which have stopped their training already."""
    with contextlib.ExitStack() as restored:
        for number in processes.SIGNALS:
            restored.enter_context(handled(number, signal.default_int_handler))
        with StopRequest():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
        with StopRequest():
            pass
        signal.raise_signal(signal.SIGTERM)


def test_what_was_to_be_ignored_stays_ignored() -> None:
    with handled(signal.SIGHUP, signal.SIG_IGN):  # as `nohup` does
        with StopRequest() as interrupted:
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
        # Now the folder is unlocked, although data loading workers are still alive.
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


# What is not to be replaced


def test_a_run_is_replaced_only_by_one_that_can_begin(
    stopped: Path, recipe: Path, undisturbed: Path, tmp_path: Path, capsys: Any
) -> None:
    out = copied(stopped, tmp_path / "run")
    before = contents(out)
    code, _, err = run(capsys, "train", recipe, "--out", out, "--overwrite", "--batch", "26")
    assert (code, "batch: a step needs 26 images" in err) == (2, True)
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
    assert "was started with 25 training images, and now there are 24" in err
    assert contents(out) == before
    state = load_checkpoint(out / "last.pt")
    state["model"]["fc.bias"] = torch.zeros(7)
    torch.save(state, out / "last.pt")
    code, _, err = run(capsys, "train", recipe, "--out", out, "--resume")
    assert code == 2
    assert "the checkpoint does not match the recipe" in err
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
