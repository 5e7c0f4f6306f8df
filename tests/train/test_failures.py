"""What a machine does to a run ends in one line, which says what is kept and how to continue."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from real_runs import (
    Gate,
    Runner,
    alive,
    assert_short,
    copied,
    outcome,
    wait_for_end,
)

from polynl.errors import is_out_of_memory
from polynl.train.loop import Trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="named pipes, /proc and resource limits")


def test_a_killed_worker_is_named_and_the_run_goes_on(
    runner: Runner, recipe: Path, images: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out, gated = tmp_path / "run", copied(images, tmp_path / "images")
    gate = Gate.at_step(gated, epoch=1, step=2)
    words = ["train", recipe, "--out", out]
    begun = runner.polynl(*words, "--workers", 2, "--data.root", gated)
    gate.wait(begun, epoch=1)
    workers = begun.workers
    os.kill(workers[0], signal.SIGKILL)
    assert begun.wait() == 1
    assert begun.complaints == (
        "polynl: a data loading worker was killed by SIGKILL, probably because memory ran out. "
        f"The last good checkpoint is {out}/last.pt, after epoch 1. To continue, lower workers or val_batch "
        "(a lower batch needs a new run) and add --resume.\n"
    )
    wait_for_end(workers)
    resumed = runner.polynl(*words, "--resume", "--workers", 0, "--val-batch", 1)
    assert resumed.wait() == 0, resumed.said
    assert outcome(out) == outcome(undisturbed)


def test_a_worker_killed_while_a_checkpoint_is_scored_is_named(
    runner: Runner, recipe: Path, images: Path, undisturbed: Path, tmp_path: Path
) -> None:
    gated = copied(images, tmp_path / "images")
    gate = Gate.in_scoring(gated)
    words = ["--checkpoint", undisturbed / "best.pt", "--workers", 1, "--data.root", gated]
    begun = runner.polynl("evaluate", recipe, *words)
    gate.wait(begun)
    os.kill(begun.workers[0], signal.SIGKILL)
    assert begun.wait() == 1
    assert begun.complaints.endswith("because memory ran out. Lower workers or val_batch.\n")
    assert_short(begun.complaints, lines=1)


@pytest.mark.parametrize("more_files", [14, 24, 200])
def test_too_few_files_end_a_run_in_one_line_or_not_at_all(
    more_files: int, runner: Runner, recipe: Path, tmp_path: Path
) -> None:
    words = ["train", recipe, "--out", tmp_path / "run", "--epochs", 1, "--workers", 2]
    begun = runner.polynl(*words, more_files=more_files)
    code = begun.wait()
    if code == 0:
        assert (begun.complaints, more_files) == ("", 200)
    else:
        assert code == 1
        assert begun.complaints.startswith("polynl: too many files are open.")
        assert "To continue, raise the limit on open files (now " in begun.complaints
        assert_short(begun.complaints, lines=1)


def memory_of_torch() -> None:
    torch.empty(1 << 50)


def memory_of_python() -> None:
    bytearray(1 << 60)


@pytest.mark.parametrize("use", [memory_of_torch, memory_of_python])
def test_out_of_memory_says_what_to_lower(
    use: Callable[[], None], recipe: Path, stopped: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(Trainer, "_losses", lambda *_: use())
    code, _, err = run(capsys, "train", recipe, "--out", tmp_path / "new")
    assert code == 1
    assert err == (
        "polynl: out of memory. There is no checkpoint yet. To continue, lower batch or val_batch and add "
        "--resume.\n"
    )
    out = copied(stopped, tmp_path / "run")
    code, _, err = run(capsys, "train", recipe, "--out", out, "--resume")
    assert code == 1
    assert f"The last good checkpoint is {out}/last.pt, after step 3 of epoch 2. To continue, lower" in err


def test_other_errors_are_not_taken_for_these(
    recipe: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
    monkeypatch.setattr(Trainer, "_losses", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(capsys, "train", recipe, "--out", tmp_path)


def test_a_run_whose_output_nobody_reads_ends_well(runner: Runner, recipe: Path, tmp_path: Path) -> None:
    done = runner.polynl("train", recipe, "--out", tmp_path / "run", unread=True)
    assert (done.wait(), done.complaints) == (0, "")
    assert (tmp_path / "run" / "last.safetensors").exists()
    assert not alive(done.pid)
