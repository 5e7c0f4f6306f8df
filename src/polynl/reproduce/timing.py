"""What the trained networks and single layers cost on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from torch import nn

from polynl.bench.cases import REFERENCE
from polynl.bench.layers import run_layers
from polynl.bench.measure import interleaved_seconds, task
from polynl.bench.networks import count_costs
from polynl.bench.settings import LayerSettings
from polynl.blocks.registry import BLOCKS
from polynl.errors import SettingsError
from polynl.report.load import LAYERS
from polynl.reproduce.settings import ReproduceSettings
from polynl.results.benchmark import STEPS, Results
from polynl.results.study import Costs

RUNS = 20
# The layers that the paper compares, with both forms of its own.
METHODS = (REFERENCE, *(name for name, entry in BLOCKS.items() if entry.in_paper), "poly_nl_direct")
# They take about a minute and a few seconds on two cores.
SIZES: dict[str, Any] = {"runs": 20, "channels": (64, 128, 256, 512), "sides": (14, 20, 28, 40, 56)}
QUICK_SIZES: dict[str, Any] = {"runs": 5, "channels": (64, 128, 256), "sides": (14, 28, 40)}


def measure_costs(models: Mapping[str, nn.Module], *, batch: int, size: int) -> dict[str, Costs]:
    """The costs of every network on the same images; runs are interleaved, so noise falls on all alike."""
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    counts = {name: count_costs(model, images[:1]) for name, model in models.items()}
    medians: dict[str, dict[str, float]] = {name: {} for name in models}
    for step in STEPS:
        tasks = {name: task(model, images, step) for name, model in models.items()}
        for name, seconds in interleaved_seconds(tasks, runs=RUNS).items():
            medians[name][f"{step}_seconds"] = statistics.median(seconds)
    return {name: Costs(**counts[name], **medians[name]) for name in models}


def measure_layers(settings: ReproduceSettings) -> Results:
    """Resume `polynl bench layers` in --out; start again on another machine or version of polynl."""
    silent = Console(quiet=True)
    if not settings.overwrite:
        try:
            return run_layers(layer_settings(settings, overwrite=False), silent)
        except SettingsError:
            # Trainings may be resumed under another commit, but times must come from one.
            pass
    return run_layers(layer_settings(settings, overwrite=True), silent)


def layer_settings(settings: ReproduceSettings, *, overwrite: bool) -> LayerSettings:
    """A small `polynl bench layers`."""
    return LayerSettings(
        blocks=METHODS,
        device="cuda" if torch.cuda.is_available() else "cpu",
        **(QUICK_SIZES if settings.quick else SIZES),
        out=settings.out / LAYERS,
        resume=not overwrite,
        overwrite=overwrite,
    )
