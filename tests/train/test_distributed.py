"""Several processes learn what one learns, and survive the failure of one of them."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from real_runs import (
    BATCH,
    EPOCHS,
    STEPS,
    TRAIN_IMAGES,
    Gate,
    Runner,
    Started,
    alive,
    copied,
    figures,
    outcome,
    wait_for_end,
    write_recipe,
)
from safetensors.torch import load_file
from torch import Tensor

from polynl.train.checkpoint import load_checkpoint
from polynl.train.loading import SeededDataset, TrainSampler, hash_seed
from polynl.train.recipe_file import load_recipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="named pipes, /proc and resource limits")
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(images: Path) -> Path:
    """A recipe whose result does not depend on which process has which image."""
    model = {"arch": "small_resnet", "arch_options": {"width": 4}, "norm": "frozen"}
    return write_recipe(images.parent / "plain.yaml", images, model=model, optimizer={"lr": 0.01})


@pytest.fixture(scope="module")
def random(images: Path) -> Path:
    """Every process has its own dropout, batch statistics and share of a batch.

    It is for three of them: the sum of two gradients is the same in either order.
    """
    return write_recipe(images.parent / "random.yaml", images, batch=None, batch_per_process=1)


@pytest.fixture(scope="module")
def plain_by_two(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Started as a user would."""
    folder = tmp_path_factory.mktemp("plain")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = Runner(folder).command(*torchrun, "-m", "polynl", "train", plain, "--out", folder / "run")
    assert done.wait() == 0, done.said
    return folder / "run"


@pytest.fixture(scope="module")
def random_by_three(random: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    done = Runner(folder).torchrun("train", random, "--out", folder / "run", processes=3)
    assert done.wait() == 0, done.said
    return folder / "run"


@pytest.fixture(scope="module")
def plain_by_one(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    done = Runner(folder).polynl("train", plain, "--out", folder / "run")
    assert done.wait() == 0, done.said
    return folder / "run"


@pytest.fixture(scope="module")
def exact(plain: Path) -> Weights:
    """The recipe's training written out, in float64."""
    recipe = load_recipe(plain)
    task = recipe.build_task()
    torch.manual_seed(hash_seed(recipe.seed))
    model, data = task.model().double().train(), SeededDataset(task.train_set(), recipe.seed)
    momenta = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for step in range(EPOCHS * STEPS):
        epoch = step // STEPS
        order = TrainSampler(len(task.train_set()), batch=BATCH, rank=0, processes=1, seed=0, epoch=epoch)
        batch = [data[key] for key in list(order)[step % STEPS]]
        pixels = torch.stack([image for image, _ in batch]).double() / 255
        mean, std = (torch.tensor(v)[:, None, None] for v in (task._data.mean, task._data.std))
        logits = model((pixels - mean) / std)
        chosen = logits.log_softmax(1)[range(BATCH), [label for _, label in batch]]
        gradients = torch.autograd.grad(-chosen.mean(), list(model.parameters()))
        lr = 0.01 * (1 + torch.cos(torch.tensor(torch.pi * step / (EPOCHS * STEPS)).double())) / 2
        for (name, weight), gradient in zip(model.named_parameters(), gradients, strict=True):
            decayed = gradient + 1e-4 * weight.detach() * (weight.ndim > 1)
            momenta[name] = 0.9 * momenta[name] + decayed
            weight.data -= lr * momenta[name]
    return model.state_dict()


def error(folder: Path, exact: Weights) -> float:
    weights = load_file(folder / "last.safetensors")
    return max((weights[name] - weight).abs().max().item() for name, weight in exact.items())


def held(
    runner: Runner, recipe: Path, images: Path, folder: Path, *, epoch: int, step: int
) -> tuple[Started, Gate, list[int]]:
    """Two processes that train in `folder`/run and wait before a step, and their ids."""
    gated = copied(images, folder / "images")
    gate = Gate.at_step(gated, epoch=epoch, step=step)
    begun = runner.torchrun("train", recipe, "--out", folder / "run", "--data.root", gated)
    gate.wait(begun, epoch=epoch)
    return begun, gate, runner.note_workers(begun)


def assert_one_message(run: Started, message: str, *, times: int = 1) -> None:
    """Only the main process prints it, once per start; everything else is torchrun's."""
    ours = [line for line in run.complaints.splitlines() if line.startswith("polynl:")]
    assert len(ours) == times, run.complaints
    assert all(message in line for line in ours), run.complaints
    assert "polynl/train" not in run.complaints, "there is a traceback of ours"


def test_two_processes_learn_what_one_learns(plain_by_one: Path, plain_by_two: Path, exact: Weights) -> None:
    # Both round at every step, in another order: their errors are alike.
    assert 0 < error(plain_by_one, exact) < 1e-5
    assert error(plain_by_two, exact) < 4 * error(plain_by_one, exact)
    one, two = figures(plain_by_one), figures(plain_by_two)
    for name in ("epoch", "step", "lr", "top1", "images", "skipped"):
        assert [row[name] for row in one] == [row[name] for row in two], name
    assert [float(row["loss"]) for row in one] == pytest.approx([float(row["loss"]) for row in two], rel=1e-6)
    assert len({row["top1"] for row in one}) > 1, "there was something to score"


def test_torchrun_stopped_and_gone_on_with_by_two_and_by_one(
    runner: Runner,
    plain: Path,
    images: Path,
    plain_by_one: Path,
    plain_by_two: Path,
    exact: Weights,
    tmp_path: Path,
    capsys: Any,
) -> None:
    out = tmp_path / "run"
    begun, gate, workers = held(runner, plain, images, tmp_path, epoch=1, step=2)
    begun.send(signal.SIGTERM)
    gate.open()
    assert begun.wait() != 0
    assert_one_message(
        begun, f"stopped by SIGTERM. The last good checkpoint is {out}/last.pt, after step 3 of"
    )
    assert not any(map(alive, workers))
    by_one = copied(out, tmp_path / "by_one")
    resumed = runner.torchrun("train", plain, "--out", out, "--resume")
    assert resumed.wait() == 0, resumed.said
    assert outcome(out) == outcome(plain_by_two)
    assert run(capsys, "train", plain, "--out", by_one, "--resume")[0] == 0
    assert error(by_one, exact) < 4 * error(plain_by_one, exact)
    assert [row["images"] for row in figures(by_one)] == [row["images"] for row in figures(plain_by_one)]


def test_a_process_that_is_killed_is_started_again_and_nothing_is_lost(
    runner: Runner, random: Path, images: Path, random_by_three: Path, tmp_path: Path, capsys: Any
) -> None:
    out, gated = tmp_path / "run", copied(images, tmp_path / "images")
    gate = Gate.at_step(gated, epoch=1, step=2, batch=3)
    words = ["train", random, "--out", out, "--data.root", gated]
    begun = runner.torchrun(*words, processes=3, restarts=2)
    for number in range(2):
        # When they are started again, they go on from the end of the first epoch.
        gate.wait(begun, epoch=1 - number)
        workers = runner.note_workers(begun)
        os.kill(workers[2 - number], signal.SIGKILL)
        gate.open(once=number == 0)
        wait_for_end(workers)
    assert begun.wait() == 0, begun.said
    assert outcome(out) == outcome(random_by_three)
    # One line for each, and no traceback.
    told = [line for line in begun.complaints.splitlines() if line.startswith("polynl: rank ")]
    assert [line.split()[2] for line in told] == ["2", "1"], begun.complaints
    kept = f"The last good checkpoint is {out}/last.pt, after epoch 1. torchrun restarts the run."
    assert all(line.endswith(kept) for line in told), told
    assert "Traceback" not in begun.complaints
    # With this recipe one process takes one image.
    code, _, err = run(capsys, "train", random, "--out", out, "--resume")
    assert code == 2
    assert "was started with 3 images per step, but these 1 processes would take 1" in err


def test_torchrun_stopped_while_it_scores_loses_nothing(
    runner: Runner, random: Path, images: Path, random_by_three: Path, tmp_path: Path
) -> None:
    out, gated = tmp_path / "run", copied(images, tmp_path / "images")
    gate = Gate.in_scoring(gated)
    begun = runner.torchrun("train", random, "--out", out, "--data.root", gated, processes=3)
    gate.wait(begun)
    # It is enough to tell one of them, and not the one that speaks.
    os.kill(runner.note_workers(begun)[1], signal.SIGTERM)
    gate.open()
    assert begun.wait() != 0
    assert_one_message(begun, "stopped by SIGTERM")
    assert load_checkpoint(out / "last.pt")["step"] == TRAIN_IMAGES // 3
    resumed = runner.torchrun("train", random, "--out", out, "--resume", processes=3)
    assert resumed.wait() == 0, resumed.said
    assert outcome(out) == outcome(random_by_three)


def test_processes_whose_torchrun_was_killed_save_and_stop(
    runner: Runner, plain: Path, images: Path, tmp_path: Path
) -> None:
    begun, gate, workers = held(runner, plain, images, tmp_path, epoch=0, step=1)
    begun.send(signal.SIGKILL)
    begun.wait()
    assert all(map(alive, workers))
    gate.open()
    wait_for_end(workers)
    assert_one_message(begun, "stopped because torchrun ended")
    state = load_checkpoint(tmp_path / "run" / "last.pt")
    assert (state["epoch"], state["step"]) == (0, 2)


def test_a_full_disk_stops_both_processes_with_one_message(
    runner: Runner, plain: Path, images: Path, tmp_path: Path
) -> None:
    begun, gate, workers = held(runner, plain, images, tmp_path, epoch=1, step=0)
    for worker in workers:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (20_000, 20_000))
    gate.open()
    assert begun.wait() != 0
    assert_one_message(begun, "cannot be written to: File too large. The last good checkpoint is")


@pytest.mark.parametrize(
    ("keys", "restarts", "message"),
    [
        (["--model.norm", "sync", "--overwrite"], 0, "model.norm: sync needs GPUs"),
        (["--batch", "5", "--overwrite"], 0, "batch: 5 images cannot be split evenly over 2 processes"),
        # What it is told to start again is a run of others.
        ([], 1, "already contains a run"),
    ],
)
def test_a_mistake_is_told_once_and_touches_nothing(
    keys: list[str],
    restarts: int,
    message: str,
    runner: Runner,
    plain: Path,
    plain_by_two: Path,
    tmp_path: Path,
) -> None:
    out = copied(plain_by_two, tmp_path / "run")
    before = times(out)
    refused = runner.torchrun("train", plain, "--out", out, *keys, restarts=restarts)
    assert refused.wait() != 0
    assert_one_message(refused, message, times=1 + restarts)
    assert times(out) == before


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
