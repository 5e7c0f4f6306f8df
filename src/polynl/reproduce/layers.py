"""What single layers cost on this machine: a small `polynl bench layers`, for the report."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from polynl.bench.layers import run_layers
from polynl.bench.settings import LayerSettings
from polynl.errors import SettingsError
from polynl.reproduce.settings import ReproduceSettings
from polynl.results.benchmark import Results
from polynl.results.load import LAYERS

METHODS = ("conv1x1", "poly_nl", "poly_nl_direct", "non_local", "efficient_nl", "latent_gnn", "tesa")
# About a minute on two cores, and some seconds.
SIZES: dict[str, Any] = {"runs": 20, "channels": (64, 128, 256, 512), "sides": (14, 20, 28, 40, 56)}
QUICK_SIZES: dict[str, Any] = {"runs": 5, "channels": (64, 128, 256), "sides": (14, 28, 40)}


def layer_settings(settings: ReproduceSettings, *, overwrite: bool) -> LayerSettings:
    """Of the layers that the paper compares, both forms of its own among them."""
    return LayerSettings(
        blocks=METHODS,
        device="cuda" if torch.cuda.is_available() else "cpu",
        **(QUICK_SIZES if settings.quick else SIZES),
        out=settings.out / LAYERS,
        resume=not overwrite,
        overwrite=overwrite,
    )


def measured_layers(settings: ReproduceSettings) -> Results:
    """Goes on with what was measured; of another machine or version of polynl it is measured anew."""
    silent = Console(quiet=True)
    if not settings.overwrite:
        try:
            return run_layers(layer_settings(settings, overwrite=False), silent)
        except SettingsError:
            # Trainings go on under another commit; times of two would not belong together.
            pass
    return run_layers(layer_settings(settings, overwrite=True), silent)
