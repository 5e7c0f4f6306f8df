"""Runs to share, of a second each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from polynl.train.loop import train
from polynl.train.recipe_file import load_recipe

TESTS = Path(__file__).parents[1]
RECIPES = {
    "classes": TESTS / "train" / "tiny.yaml",
    "instances": TESTS / "tiny_instances.yaml",
    "faces": TESTS / "tiny_faces.yaml",
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of one epoch per kind."""
    root = tmp_path_factory.mktemp("runs")
    for name, file in RECIPES.items():
        # So short a training leaves no face above the usual threshold.
        lower = ["--model.detector-options.score-thresh", "0.001"] if name == "faces" else []
        train(load_recipe(file, ["--epochs", "1", *lower]), root / name, Console(quiet=True))
    return {name: root / name for name in RECIPES}


@pytest.fixture
def classifier(runs: dict[str, Path]) -> Path:
    return runs["classes"]


@pytest.fixture(scope="session")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photos") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path
