"""The layers that are measured: every block of the registry, convolutions, and other libraries' layers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from polynl.blocks.registry import (
    BLACK,
    BLOCKS,
    BLUE,
    FAMILY_TITLES,
    GREEN,
    PURPLE,
    SKY,
    VERMILLION,
    Style,
    build_block,
)
from polynl.errors import check_choices
from polynl.results.benchmark import Point

REFERENCE = "conv1x1"


Matrices = Callable[[Point], float]


@dataclass(frozen=True)
class Case:
    """A layer under measurement.

    `build` makes it for a number of channels; `family` is its group in figures. Layers that are quadratic in
    the positions have `largest_matrices`: how many entries the matrices have that they hold at their peak, by
    point. On large maps everything else they hold is small by comparison.
    """

    name: str
    label: str
    style: Style
    family: str
    build: Callable[[int], nn.Module]
    largest_matrices: Matrices | None = None
    package: str | None = None

    def predicted_peak(self, point: Point, itemsize: int) -> int | None:
        """The bytes of the matrices that grow with the square of the positions; None if there are none."""
        if self.largest_matrices is None:
            return None
        return int(point.batch * self.largest_matrices(point) * itemsize)

    def available(self) -> bool:
        """Whether the package it comes from is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def _convolution(kernel_size: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, bias=False)


def _mmcv(mode: str, channels: int) -> nn.Module:
    from mmcv.cnn import NonLocal2d

    return NonLocal2d(channels, mode=mode, zeros_init=False)


def _timm(channels: int) -> nn.Module:
    from timm.layers.non_local_attn import NonLocalAttn

    return NonLocalAttn(channels)


def _pairs(forward: float, training: float) -> Matrices:
    """The number of N×N matrices at the peak."""
    return lambda point: (training if point.step == "training" else forward) * point.size("positions") ** 2


def _tesa_matrices(point: Point) -> float:
    """S×S per mode, S being the product of the other axes; training keeps all three."""
    channel_mode = point.size("positions") ** 2
    rows_and_columns = [(point.size("channels") * size) ** 2 for size in point.spatial]
    kept = channel_mode + sum(rows_and_columns) if point.step == "training" else 0
    return kept + max(channel_mode, *rows_and_columns)


@dataclass(frozen=True)
class Form:
    """A block with options; the form without a `name` is measured instead of the block's defaults."""

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    style: Style | None = None
    """Default: the block's style."""
    largest_matrices: Matrices | None = None


FORMS = {
    "non_local": [
        Form("dot product", {"form": "quadratic"}, largest_matrices=_pairs(2, 2)),
        Form("Gram form", {"form": "gram"}, "gram", Style(BLUE, "v", "--")),
        Form("softmax", {"mode": "embedded_gaussian"}, "softmax", Style(SKY, ">")),
    ],
    "tesa": [
        Form("cheap order"),
        Form("quadratic", {"order": "quadratic"}, "quadratic", Style(PURPLE, "p"), _tesa_matrices),
    ],
    "poly_nl": [Form(""), Form("direct form", {"form": "direct"}, "direct", Style(VERMILLION, "P", "--"))],
    "polynomial": [Form("order 3")],
}


def _cases(block: str) -> Iterator[Case]:
    entry = BLOCKS[block]
    for form in FORMS.get(block, [Form("")]):
        yield Case(
            f"{block}_{form.name}" if form.name else block,
            f"{entry.label}, {form.label}" if form.label else entry.label,
            entry.style if form.style is None else form.style,
            FAMILY_TITLES[entry.family],
            partial(build_block, block, init="random", **form.options),
            form.largest_matrices,
        )


CASES = [
    Case(REFERENCE, "1×1 convolution", Style(BLACK, "o"), "", _convolution(1)),
    Case("conv3x3", "3×3 convolution", Style(BLACK, "s", "--"), FAMILY_TITLES["local"], _convolution(3)),
    # Blocks that see neighbours only are the convolutions above.
    *(case for name, entry in BLOCKS.items() if entry.family != "local" for case in _cases(name)),
]
_dot, _softmax = partial(_mmcv, "dot_product"), partial(_mmcv, "embedded_gaussian")
_OTHERS = "Other libraries"
PEERS = [
    Case("mmcv_dot_product", "mmcv, dot product", Style(BLUE, "1", ":"), _OTHERS, _dot, _pairs(1, 2), "mmcv"),
    Case("mmcv_softmax", "mmcv, softmax", Style(SKY, "2", ":"), _OTHERS, _softmax, _pairs(2, 3), "mmcv"),
    Case("timm", "timm, softmax", Style(GREEN, "3", ":"), _OTHERS, _timm, _pairs(2, 3), "timm"),
]
BY_NAME = {case.name: case for case in (*CASES, *PEERS)}
LOOKS = {name: (case.style, case.family) for name, case in BY_NAME.items()}
# Names that stand for layers above: all that polynl has, and the block `conv`.
ALL = "all"
ALIASES = {ALL: [case.name for case in CASES], "conv": [REFERENCE]}


def layer_names(names: Iterable[str], kind: str) -> tuple[str, ...]:
    """The names without duplicates, `all` and `conv` resolved; a SettingsError if one is unknown."""
    given = check_choices(names, [*BY_NAME, *ALIASES], kind)
    return tuple(dict.fromkeys(layer for name in given for layer in ALIASES.get(name, [name])))


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """The module with random parameters: zeros could make its work easier.

    Matrices preserve the variance of their input; scales lie between 0.5 and 1.5.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                std = (parameter.numel() / parameter.shape[0]) ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return module
