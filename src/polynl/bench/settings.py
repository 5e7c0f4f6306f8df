"""The options of `polynl bench`, checked where they are declared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from polynl.bench.cases import BY_NAME, CASES
from polynl.errors import SettingsError, check_choices, check_resume_or_overwrite

# They say where a run is kept and not what it measures.
ABOUT_THE_FILE = ("out", "resume", "overwrite")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What layers and networks have in common."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the input and of all parameters."""
    threads: int | None = None
    """CPU threads of an operator; PyTorch's own choice unless given."""
    runs: int = 20
    """Timed runs of every method at every size; the value shown is their median."""
    compile: bool = False
    """Measure under torch.compile."""
    channels_last: bool = False
    """Lay maps out with the channels last."""
    time_limit_s: float = 10.0
    """A method is left out where one step takes longer than this, and at all larger maps."""
    seed: int = 0
    """Of inputs and parameters."""
    resume: bool = False
    """Go on with the interrupted run in --out; the settings must be the same."""
    overwrite: bool = False
    """Replace the run in --out."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field.name, getattr(self, field.name))
        check_resume_or_overwrite(resume=self.resume, overwrite=self.overwrite)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SettingsError("--device cuda: PyTorch sees no CUDA device here.")

    def _check(self, name: str, value: Any) -> None:
        values = value if isinstance(value, tuple) else (value,)
        option = f"--{name.replace('_', '-')}"
        if not values:
            raise SettingsError(f"{option} needs at least one value.")
        for number in values:
            if (
                isinstance(number, int | float)
                and not isinstance(number, bool)
                and name != "seed"
                and number <= 0
            ):
                raise SettingsError(f"{option} {number}: expected a number above 0.")

    def measured(self) -> dict[str, Any]:
        """The settings that a measurement depends on, as JSON has them."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            if field.name not in ABOUT_THE_FILE
            for value in [getattr(self, field.name)]
        }

    def command(self, *words: str) -> str:
        """The command line that gives these settings, without what only says where the run is kept."""
        parts = ["polynl", *words]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ABOUT_THE_FILE or value == field.default:
                continue
            parts.append(f"--{field.name.replace('_', '-')}")
            if not isinstance(value, bool):
                parts += map(str, value if isinstance(value, tuple) else (value,))
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    """Run time and peak memory of one layer, against channels and against positions (the paper's Figure 2).

    Writes layers.json, layers.md and the figures to --out. Layers start from random parameters.
    """

    blocks: tuple[str, ...] = tuple(case.name for case in CASES)
    """The layers; conv1x1 is always among them, since the others are divided by it."""
    peers: bool = False
    """Also those of mmcv and timm, where installed."""
    batch: int = 1
    """Maps in a batch."""
    channels: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Widths of the sweep over channels."""
    at_side: int = 14
    """Side of the map in the sweep over channels."""
    sides: tuple[int, ...] = (14, 20, 28, 40, 56, 80, 112)
    """Sides of the square maps in the sweep over positions."""
    at_channels: int = 256
    """Channels in the sweep over positions."""
    memory_limit_gib: float = 4.0
    """A quadratic layer is left out where the matrices it would need exceed this."""
    out: Path = Path("runs/bench/layers")
    """Folder for the results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self.blocks, list(BY_NAME), "layer")


@dataclass(frozen=True, kw_only=True)
class NetSettings(Settings):
    """Whole networks with each block at each placement: latency, throughput, multiply-adds, peak memory.

    Writes nets.json and nets.md to --out. Latency is that of a batch of one, throughput that of --batch.
    """

    network: str = "resnet50"
    """What the blocks go into: resnet18, 50 or 101, mask_rcnn_resnet18 or 50, faces_resnet18 or 50."""
    blocks: tuple[str, ...] = ("poly_nl", "non_local", "efficient_nl", "latent_gnn", "tesa")
    """Blocks, by the names of `polynl bench layers`; the plain network is always there."""
    placements: tuple[str, ...] = ("res4",)
    """Where they go: res3, res4, res5, res345."""
    batch: int = 8
    """Images in the batch that throughput is measured with."""
    side: int = 224
    """Side of the square images."""
    training: bool = False
    """Also time a forward and backward pass of the batch."""
    out: Path = Path("runs/bench/nets")
    """Folder for the results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self.blocks, list(BY_NAME), "block")
