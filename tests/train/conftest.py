"""An undisturbed run, and fixtures to start others to compare with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import (
    Gate,
    Runner,
    copied,
    make_images,
    write_recipe,
)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.clean_up()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="session")
def recipe(images: Path) -> Path:
    return write_recipe(images.parent / "recipe.yaml", images)


@pytest.fixture(scope="session")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    runner = Runner(folder)
    finished = runner.polynl("train", recipe, "--out", folder / "run")
    assert finished.wait() == 0, finished.said
    return folder / "run"


@pytest.fixture(scope="session")
def stopped(recipe: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped in epoch 2: last.pt is from its third step, previous.pt from the end of epoch 1."""
    folder = tmp_path_factory.mktemp("stopped")
    runner, gated = Runner(folder), copied(images, folder / "images")
    gate = Gate.at_step(gated, epoch=1, step=2)
    begun = runner.polynl("train", recipe, "--out", folder / "run", "--data.root", gated)
    gate.wait(begun, epoch=1)
    begun.send(signal.SIGTERM)
    gate.open()
    assert begun.wait() == 128 + signal.SIGTERM, begun.said
    return folder / "run"
