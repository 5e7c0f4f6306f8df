"""Folders of results as commands leave them: with figures written by hand, or of real tiny trainings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from polynl.results.benchmark import Measurement, Point, Results
from polynl.train.loop import train
from polynl.train.recipe_file import load_recipe, to_yaml

TESTS = Path(__file__).parent.parent
TINY = {
    "classification": TESTS / "train" / "tiny.yaml",
    "instance_segmentation": TESTS / "tiny_instances.yaml",
    "face_detection": TESTS / "tiny_faces.yaml",
}
SILENT = Console(quiet=True)
MACHINE = {"cpu": "a processor", "cores": 2, "threads": 1, "torch": "2.9", "polynl": "0.1", "commit": "abc"}
COSTS = {"parameters": 1000, "multiply_adds": 2_000_000, "forward_seconds": 1.0, "training_seconds": 2.0}


def row(epoch: int, **figures: Any) -> dict[str, Any]:
    return {"epoch": epoch, "loss": 3.0 - epoch, "seconds": 30.0, **figures}


def written(
    folder: Path, rows: Sequence[Mapping[str, Any]], *keys: str, task: str = "classification"
) -> Path:
    """A folder of `polynl train`, without weights."""
    recipe = load_recipe(TINY[task], keys)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    (folder / "metrics.json").write_text(json.dumps(rows))
    command = f"polynl train tiny --out {folder.name}"
    (folder / "environment.json").write_text(json.dumps({"command": command, "seed": 0, **MACHINE}))
    return folder


def trained(folder: Path, *keys: str, task: str = "classification") -> Path:
    """A folder of `polynl train`, as it is."""
    train(load_recipe(TINY[task], keys), folder, SILENT)
    return folder


def outcome(block: str, *trainings: Sequence[Mapping[str, Any]], **costs: float) -> dict[str, Any]:
    epochs = {str(seed): list(rows) for seed, rows in enumerate(trainings)}
    return {"block": block, "epochs": epochs, **COSTS, **costs}


def reproduced(folder: Path, outcomes: Sequence[Mapping[str, Any]], *, quick: bool = False) -> Path:
    """results.json as `polynl reproduce` writes it."""
    recipe = load_recipe(TINY["classification"]).model_dump(mode="json")
    content = {
        "command": "polynl reproduce --out results",
        "quick": quick,
        "environment": MACHINE,
        "recipe": recipe,
        "outcomes": outcomes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(content))
    return folder


SETTINGS = {
    "batch": 1,
    "dtype": "float32",
    "device": "cpu",
    "runs": 1,
    "channels": [8, 16],
    "sides": [2, 4, 8],
    "at_side": 4,
    "at_channels": 16,
}
METHODS = {
    "conv1x1": {"label": "1×1 convolution"},
    "poly_nl": {"label": "Poly-NL"},
    "tesa": {"label": "TESA"},
}


def layers(*, skipped: str | None = None, until: int = 100) -> Results:
    """Times are the number of positions, Poly-NL's doubled; of TESA the largest map may be skipped.

    `until`: how many points were measured before it was interrupted.
    """
    sizes = dict.fromkeys([*((4, c) for c in SETTINGS["channels"]), *((s, 16) for s in SETTINGS["sides"])])
    points = [Point(step, 1, side, channels) for step in ("forward", "training") for side, channels in sizes]
    results = Results("layers", "polynl bench layers", dict(SETTINGS), MACHINE, METHODS, "conv1x1")
    for point in points[:until]:
        seconds, count = point.side**2 / 1e3, 1024 * point.side**2
        results.measurements += [
            Measurement("conv1x1", point, (seconds,), count),
            Measurement("poly_nl", point, (2 * seconds,), 3 * count),
            Measurement("tesa", point, skipped=skipped)
            if skipped and point.side == 8
            else Measurement("tesa", point, (250 * seconds,), 4 * count),
        ]
    return results


def networks() -> Results:
    settings = {
        "side": 32,
        "batch": 2,
        "dtype": "float32",
        "runs": 1,
        "training": False,
        "network": "resnet18",
    }
    known = {"parameters": 1_000_000, "multiply_adds": 10**9}
    methods = {
        "plain": {"label": "ResNet-18", **known},
        "poly_nl@res4": {"label": "Poly-NL at res4", "parameters": 1_500_000, "multiply_adds": 2 * 10**9},
    }
    results = Results("nets", "polynl bench nets", settings, MACHINE, methods, "plain")
    for batch in (1, 2):
        results.measurements.append(Measurement("plain", Point("forward", batch, 32), (0.01,), 100))
    results.measurements.append(Measurement("poly_nl@res4", Point("forward", 1, 32), (0.03,), 100))
    results.measurements.append(Measurement("poly_nl@res4", Point("forward", 2, 32), skipped="too slow"))
    return results
