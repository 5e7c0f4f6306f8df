"""Networks of timm as the backbones of detectors: their maps, with torchvision's feature pyramid on them."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

# Detectors of torchvision pad the sides of images to multiples of it.
PADDED = 32


class TimmPyramid(nn.Module):
    """The parts of torchvision's BackboneWithFPN; `body` keeps timm's names of weights."""

    def __init__(self, body: nn.Module, indices: Sequence[int], fpn: FeaturePyramidNetwork) -> None:
        super().__init__()
        self.body, self.fpn = body, fpn
        self.indices = list(indices)
        self.out_channels = fpn.inner_blocks[0][0].out_channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The maps of the pyramid by name, from fine to coarse."""
        body: Any = self.body
        maps = body.forward_intermediates(x, indices=self.indices, intermediates_only=True)
        return self.fpn(OrderedDict((str(number), values) for number, values in enumerate(maps)))


def maps_by_level(body: Any, arch: str) -> dict[int, tuple[int, int]]:
    """For every stride 2^level from 4 on, the last map's index and its channels."""
    if not hasattr(body, "forward_intermediates") or not hasattr(body, "feature_info"):
        raise ValueError(f"arch={arch!r}: timm does not give the maps of this network; choose another")
    levels: dict[int, tuple[int, int]] = {}
    for index, info in enumerate(body.feature_info):
        if info["reduction"] >= 4:
            levels[round(math.log2(info["reduction"]))] = index, info["num_chs"]
    return levels


def check_takes(backbone: TimmPyramid, side: int, arch: str) -> None:
    """Raise a ValueError unless the network takes images of this height and width."""
    side = PADDED * math.ceil(side / PADDED)
    try:
        copy.deepcopy(backbone).eval().to("meta")(torch.empty(1, 3, side, side, device="meta"))
    except Exception as error:  # networks raise anything for images that they do not take
        if "meta" in str(error).lower():
            return  # it needs values
        reason = str(error).rstrip(".! ") or repr(error)
        raise ValueError(
            f"arch={arch!r} does not take images of {side} × {side}: {reason}. Choose another network, or "
            "for ViTs arch_options: {dynamic_img_size: true}, for Swins {strict_img_size: false}"
        ) from error


def drop_head(body: Any) -> None:
    """Replace what comes after the last map, whose weights would get no gradient."""
    last = body.feature_info[-1]["module"].partition(".")[0]
    children = [name for name, _ in body.named_children()]
    for name in children[children.index(last) + 1 :]:
        setattr(body, name, nn.Identity())
