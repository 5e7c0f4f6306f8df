"""One reproduction with real networks, a detector's run beside it, and the page of all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from finished_runs import SILENT, layers, networks, outcome, reproduced, trained
from safetensors.torch import load_file, save_file

from polynl.report.run import run_report

BLOCKS = ("none", "non_local", "tesa", "poly_nl")


@pytest.fixture(scope="session")
def reproduction(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `polynl reproduce` leaves: four tiny networks, their costs, and times of layers."""
    folder = tmp_path_factory.mktemp("reproduction") / "results"
    outcomes = []
    for place, block in enumerate(BLOCKS):
        run = trained(folder / f"{block}-seed0", "--model.block", block, "--optimizer.lr", "0.1")
        rows = json.loads((run / "metrics.json").read_text())
        outcomes.append(outcome(block, rows, forward_seconds=1.0 + 0.25 * place))
    add_much(folder / "poly_nl-seed0" / "best.safetensors")
    reproduced(folder, outcomes, quick=True)
    layers(skipped="too slow").save(folder / "layers" / "layers.json")
    return folder


def add_much(weights: Path) -> None:
    """A block begins as the identity, and has hardly learned to add anything after so few steps."""
    state = load_file(weights)
    (beta,) = (name for name in state if name.endswith(".beta"))
    save_file(state | {beta: torch.full_like(state[beta], 3.0)}, weights)


@pytest.fixture(scope="session")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 80 pixels are padded to 96: of 24 × 24 positions of its block 20 × 20 are in the image."""
    sizes = ("--model.min-size", "80", "--model.max-size", "80", "--data.val-images", "3")
    return trained(
        tmp_path_factory.mktemp("detector") / "masks", "--epochs", "1", *sizes, task="instance_segmentation"
    )


@pytest.fixture(scope="session")
def blind(detector: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same detector, sure of nothing: it finds nothing."""
    folder = tmp_path_factory.mktemp("blind") / "blind"
    shutil.copytree(detector, folder)
    recipe = folder / "recipe.yaml"
    text = recipe.read_text()
    assert "box_detections_per_img: 10" in text
    recipe.write_text(
        text.replace("box_detections_per_img: 10", "box_detections_per_img: 10\n    box_score_thresh: 0.999")
    )
    return folder


@pytest.fixture(scope="session")
def report(reproduction: Path, detector: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all of it."""
    folder = tmp_path_factory.mktemp("report")
    networks().save(folder / "bench" / "nets.json")
    return run_report([reproduction, detector, folder / "bench"], folder / "report.html", SILENT)
