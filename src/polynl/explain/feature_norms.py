"""The norm per position of what goes into a block, of what it adds, and of what comes out: Figure 4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polynl.blocks.base import Block
from polynl.explain.capture import Images, as_given, block_of, passed


class FeatureNorms(NamedTuple):
    """Maps (b, *spatial) of norms over channels, given as `grad_cam` gives its maps."""

    x: Any
    """The block's input."""
    y: Any
    """What it adds: Z − αX."""
    z: Any
    """Its output."""


def feature_norms(model: nn.Module, images: Images, *, block: str | None = None) -> FeatureNorms:
    """‖X‖, ‖Y‖ and ‖Z‖ at every position of a block's map; of the first block in the model unless named.

    `images`: as of `grad_cam`. `block`: the dotted name of a block, or of the module that it stands at.

    >>> import torch, polynl
    >>> from torchvision.models import resnet18
    >>> model = polynl.insert(resnet18(), "poly_nl", before="layer3.1")
    >>> feature_norms(model, torch.randn(2, 3, 64, 96)).z.shape
    torch.Size([2, 4, 6])
    """
    name = block_of(model, block)
    seen, frames = passed(model, images, name)
    module = model.get_submodule(name)
    # Squares of half precision would overflow.
    x, z = (maps.to(torch.promote_types(maps.dtype, torch.float32)) for maps in (seen.x, seen.z))
    with torch.no_grad():
        y = z - (module.scales()[0] * x if isinstance(module, Block) else x)
    return FeatureNorms(*(_norms(images, maps, frames) for maps in (x, y, z)))


def _norms(images: Images, maps: Tensor, frames: Any) -> Any:
    norms = maps.norm(dim=1).float()
    return as_given(images, [frame.cut(norm) for norm, frame in zip(norms, frames, strict=True)])
