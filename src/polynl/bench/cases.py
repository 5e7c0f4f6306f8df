"""The layers that are measured: one line each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from polynl.blocks import build_block

REFERENCE = "conv1x1"


@dataclass(frozen=True)
class Shape:
    """A batch of square maps."""

    batch: int
    channels: int
    side: int

    @property
    def positions(self) -> int:
        """N, the positions of one map."""
        return self.side**2


@dataclass(frozen=True)
class Case:
    """A layer under measurement.

    `build` makes it for a number of channels. `largest_matrices` is there for layers that are quadratic in
    the positions: the entries of the matrices they hold at once at their peak, by shape, for a forward pass
    and for a training step. All else they hold is small beside these once the map is large.
    """

    name: str
    label: str
    build: Callable[[int], nn.Module]
    largest_matrices: Callable[[Shape], tuple[float, float]] | None = None
    package: str | None = None

    def predicted_peak(self, shape: Shape, training: bool, itemsize: int) -> int | None:
        """The bytes of the matrices that grow with the square of the positions, or None without any."""
        if self.largest_matrices is None:
            return None
        return int(shape.batch * self.largest_matrices(shape)[training] * itemsize)

    def available(self) -> bool:
        """Whether the package it comes from is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def _block(name: str, **options: Any) -> Callable[[int], nn.Module]:
    return partial(build_block, name, init="random", **options)


def _convolution(kernel_size: int) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, bias=False)


def _mmcv(mode: str) -> Callable[[int], nn.Module]:
    def build(channels: int) -> nn.Module:
        from mmcv.cnn import NonLocal2d

        return NonLocal2d(channels, mode=mode, zeros_init=False)

    return build


def _timm(channels: int) -> nn.Module:
    from timm.layers.non_local_attn import NonLocalAttn

    return NonLocalAttn(channels)


def _pairs(forward: float, training: float) -> Callable[[Shape], tuple[float, float]]:
    """So many N×N matrices at the peak."""
    return lambda shape: (forward * shape.positions**2, training * shape.positions**2)


def _tesa_matrices(shape: Shape) -> tuple[float, float]:
    """S×S for each mode, S the product of the axes that are not the mode's; training keeps all three."""
    channel_mode, row_mode = shape.positions**2, (shape.channels * shape.side) ** 2
    largest = max(channel_mode, row_mode)
    return largest, channel_mode + 2 * row_mode + largest


CASES = [
    Case(REFERENCE, "1×1 convolution", _convolution(1)),
    Case("conv3x3", "3×3 convolution", _convolution(3)),
    Case("poly_nl", "Poly-NL", _block("poly_nl")),
    Case("poly_nl_direct", "Poly-NL, direct form", _block("poly_nl", form="direct")),
    Case("non_local", "Non-local, dot product", _block("non_local", form="quadratic"), _pairs(2, 2)),
    Case("non_local_gram", "Non-local, Gram form", _block("non_local", form="gram")),
    Case("non_local_softmax", "Non-local, softmax", _block("non_local", mode="embedded_gaussian")),
    Case("efficient_nl", "Efficient-NL", _block("efficient_nl")),
    Case("latent_gnn", "Latent-GNN", _block("latent_gnn")),
    Case("tesa", "TESA, cheap order", _block("tesa")),
    Case("tesa_quadratic", "TESA, quadratic", _block("tesa", order="quadratic"), _tesa_matrices),
    Case("polynomial", "Polynomial, order 3", _block("polynomial")),
]
PEERS = [
    Case("mmcv_dot_product", "mmcv, dot product", _mmcv("dot_product"), _pairs(1, 2), "mmcv"),
    Case("mmcv_softmax", "mmcv, softmax", _mmcv("embedded_gaussian"), _pairs(2, 3), "mmcv"),
    Case("timm", "timm, softmax", _timm, _pairs(2, 3), "timm"),
]
BY_NAME = {case.name: case for case in (*CASES, *PEERS)}


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """The module with every parameter random, none at a zero that could make its work easier.

    Matrices keep the variance of what they multiply; scales lie between 0.5 and 1.5.
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
