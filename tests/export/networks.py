"""Small networks to export, with random weights: a block that starts as the identity would hide mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polynl import BLOCKS, build_block, insert

CHANNELS = 8
# The defaults of all blocks, and what runtimes have stumbled over.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in BLOCKS},
    "softmax": ("non_local", {"mode": "embedded_gaussian", "scale": "inner"}),
    "gaussian": ("non_local", {"mode": "gaussian", "sub_sample": "after"}),
    "concatenation": ("non_local", {"mode": "concatenation", "norm": "batch"}),
    "symmetric": ("latent_gnn", {"latent_dims": 3, "mode": "symmetric", "graph_conv": True}),
}


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter and statistic drawn anew, in eval mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
            elif buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.4)
    return module.eval()


class Everything(nn.Module):
    """All blocks side by side, each on the input itself: one export for all of them."""

    def __init__(self, variants: Mapping[str, tuple[str, dict[str, Any]]] = VARIANTS) -> None:
        super().__init__()
        blocks = {key: build_block(name, CHANNELS, **options) for key, (name, options) in variants.items()}
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: block(x) for name, block in self.blocks.items()}


def small_network() -> nn.Module:
    """A convolution with Poly-NL after it, then a classifier."""
    layers = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, stride=2), nn.BatchNorm2d(CHANNELS), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return randomised(insert(layers, "poly_nl", after="0", channels=CHANNELS))
