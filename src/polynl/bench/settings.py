"""The options of `polynl bench`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from polynl.bench.cases import CASES, layer_names
from polynl.blocks.registry import BLOCKS
from polynl.errors import SettingsError, check_resume_or_overwrite

# PyTorch crashes with very many.
MOST_THREADS = 1024
# Options of `bench layers` that say which sizes its sweeps have.
SWEEPS = ("batch", "channels", "at_side", "sides", "at_channels")
# They do not change what is measured.
ABOUT_THE_FILE = ("out", "resume", "overwrite")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options that layers and networks share."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device to run on."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the input and of all parameters."""
    threads: int | None = None
    """CPU threads per operator (default: PyTorch's choice)."""
    runs: int = 20
    """Timed runs per method and size; tables show their median."""
    compile: bool = False
    """Measure under torch.compile."""
    channels_last: bool = False
    """Use the channels-last memory format."""
    time_limit_s: float = 10.0
    """Skip a method, here and on larger maps, once a step takes longer than this."""
    seed: int = 0
    """Random seed of inputs and parameters."""
    resume: bool = False
    """Resume the interrupted run in --out; the settings must be the same."""
    overwrite: bool = False
    """Replace the run in --out."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if value == () and field.default != ():
                raise SettingsError(f"{option} needs at least one value.")
            for number in _single(value):
                # A flag is an int too; a seed may be 0.
                if type(number) in (int, float) and field.name != "seed" and number <= 0:
                    raise SettingsError(f"{option} {number}: expected a number above 0.")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise SettingsError(f"--threads {self.threads}: expected at most {MOST_THREADS}.")
        check_resume_or_overwrite(resume=self.resume, overwrite=self.overwrite)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SettingsError("--device cuda: PyTorch finds no CUDA device.")

    def measured(self) -> dict[str, Any]:
        """The settings that a measurement depends on, as plain JSON."""
        return {
            field.name: _listed(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ABOUT_THE_FILE
        }

    def command(self, *words: str) -> str:
        """The command line that gives these settings, without --out, --resume and --overwrite."""
        parts = ["polynl", *words]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ABOUT_THE_FILE or value == field.default:
                continue
            parts.append(f"--{field.name.replace('_', '-')}")
            if not isinstance(value, bool):
                parts += map(str, _single(value))
        return " ".join(parts)


def _single(value: Any) -> list[Any]:
    """The values in tuples of tuples, one after the other."""
    return [single for part in value for single in _single(part)] if isinstance(value, tuple) else [value]


def _listed(value: Any) -> Any:
    """Tuples as lists, which JSON has."""
    return [_listed(part) for part in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    """Measure time and peak memory of single layers against channels and positions (the paper's Figure 2).

    Writes layers.json, layers.md and figures to --out. All layers have random parameters.
    """

    blocks: tuple[str, ...] = tuple(case.name for case in CASES)
    """Layers to measure (default: all of them); conv1x1 is always included as the reference."""
    peers: bool = False
    """Also measure the layers of mmcv and timm, if installed."""
    shape: tuple[tuple[int, int, int, int], ...] = ()
    """Maps to measure instead of the sweeps, each as B C H W: --shape 1 256 56 56 8 64 40 60 has two."""
    batch: int = 1
    """Batch size."""
    channels: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Widths in the sweep over channels."""
    at_side: int = 14
    """Side of the map in the sweep over channels."""
    sides: tuple[int, ...] = (14, 20, 28, 40, 56, 80, 112)
    """Sides of the square maps in the sweep over positions."""
    at_channels: int = 256
    """Width in the sweep over positions."""
    memory_limit_gib: float = 4.0
    """Skip a quadratic layer if its matrices would need more than this."""
    out: Path = Path("runs/bench/layers")
    """Folder for the results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "blocks", layer_names(self.blocks, "layer"))
        for field in dataclasses.fields(self):
            if self.shape and field.name in SWEEPS and getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise SettingsError(
                    f"{option} is for the sweeps, which --shape replaces: leave one of them out."
                )


@dataclass(frozen=True, kw_only=True)
class NetSettings(Settings):
    """Measure whole networks with each block at each placement: latency, throughput, multiply-adds, memory.

    Writes nets.json and nets.md to --out. Latency is that of one image, throughput that of --batch.
    """

    network: str = "resnet50"
    """Network to insert them into: resnet18, 50 or 101, {mask_rcnn,faster_rcnn,faces}_resnet18 or 50, or a
    classifier by its name, as torchvision/NAME or timm/NAME."""
    blocks: tuple[str, ...] = tuple(name for name, entry in BLOCKS.items() if entry.in_paper)
    """Blocks to insert, by their names in `polynl bench layers`, or all; the plain network is always
    included."""
    placements: tuple[str, ...] = ("res4",)
    """Where to insert them: res3, res4, res5, res345; in networks of torchvision and timm also before any
    module, by its name."""
    batch: int = 8
    """Batch size for throughput, memory and training."""
    side: int = 224
    """Side of the square images."""
    training: bool = False
    """Also time a training step: forward and backward pass of the batch."""
    out: Path = Path("runs/bench/nets")
    """Folder for the results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "blocks", layer_names(self.blocks, "block"))
