"""The norm per position of a block's input, of what it adds, and of its output: the paper's Figure 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from polynl.blocks.base import Block
from polynl.explain.capture import Activation, Frame, Images, block_of, capture, like_images


class FeatureNorms(NamedTuple):
    """Maps (b, *spatial) of norms over channels, in the layout of `grad_cam`'s maps."""

    x: Any
    """The block's input."""
    y: Any
    """What it adds: Z − αX."""
    z: Any
    """Its output."""


def feature_norms(model: nn.Module, images: Images, *, block: str | None = None) -> FeatureNorms:
    """‖X‖, ‖Y‖ and ‖Z‖ at every position of a block's map.

    `images`: see `grad_cam`.
    `block`: dotted name of a block or of the module it stands at (default: the first block).

    >>> import torch, polynl
    >>> from torchvision.models import resnet18
    >>> model = polynl.insert(resnet18(), "poly_nl", before="layer3.1")
    >>> feature_norms(model, torch.randn(2, 3, 64, 96)).z.shape
    torch.Size([2, 4, 6])
    """
    name = block_of(model, block)
    captured = capture(model, images, modules=[name])
    norms = norms_at(model.get_submodule(name), captured.activations[name], captured.frames)
    return FeatureNorms(*(like_images(images, maps) for maps in norms))


def norms_at(block: nn.Module, activation: Activation, frames: Sequence[Frame]) -> FeatureNorms:
    """The norms of a captured activation: for X, Y and Z a list of one map for each image."""
    # Squares of half precision would overflow.
    both = activation.input, activation.output
    x, z = (maps.to(torch.promote_types(maps.dtype, torch.float32)) for maps in both)
    with torch.no_grad():
        y = z - (block.scales()[0] * x if isinstance(block, Block) else x)
    norms = (maps.norm(dim=1).float() for maps in (x, y, z))
    return FeatureNorms(
        *([frame.crop(norm) for norm, frame in zip(maps, frames, strict=True)] for maps in norms)
    )
