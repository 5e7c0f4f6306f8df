"""A convolution with the interface of a block: the baseline of all comparisons."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Device, Init, LocalBlock, factory_of, without
from polynl.blocks.options import choice, flag
from polynl.functional.summary import Summary


class ConvBaseline(LocalBlock):
    """Z = X * W, a C→C convolution with a kernel of 1 or 3 along each axis, padded to keep the size.

    With `residual`, Z = X + X * W: the control of a comparison of blocks, which are residual too.
    A kernel of 3 works for maps with `spatial_axes` axes only; a kernel of 1 works for any.

    Identity: W is the unit impulse, or zero if `residual`; all of it receives gradient at once. A linear
    layer does not need fp32 under autocast and computes in autocast's dtype; there, the identity is the input
    rounded to that dtype.
    """

    leaves_autocast = False

    def __init__(
        self,
        channels: int,
        *,
        kernel_size: Literal[1, 3] = 1,
        bias: bool = False,
        residual: bool = False,
        spatial_axes: int = 2,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.kernel_size = choice("kernel_size", kernel_size, (1, 3))
        self.bias = flag("bias", bias)
        self.residual = flag("residual", residual)
        self.spatial_axes = choice("spatial_axes", spatial_axes, (1, 2, 3))
        self.uses_grid = kernel_size > 1
        factory, kernel = factory_of(device, dtype), (kernel_size,) * spatial_axes
        self.weight = nn.Parameter(torch.empty(channels, channels, *kernel, **factory))
        self.offset = nn.Parameter(torch.empty(channels, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity's weights, or variance-preserving ones; a zero bias."""
        if self.init == "identity" and self.residual:
            nn.init.zeros_(self.weight)
        elif self.init == "identity":
            nn.init.dirac_(self.weight)
        else:
            nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        if self.offset is not None:
            nn.init.zeros_(self.offset)

    def why_not_in_parts(self) -> str | None:
        """A kernel of 3 sees beyond a part."""
        return None if self.kernel_size == 1 else "its kernel needs the neighbours of a part"

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """The convolution of the unfolded map; to neighbours, positions of weight 0 are padding."""
        axes = len(spatial)
        if self.kernel_size > 1 and axes != self.spatial_axes:
            raise ValueError(
                f"ConvBaseline: x has {axes} spatial axes; this block was built for "
                f"spatial_axes={self.spatial_axes}: construct it with spatial_axes={axes}"
            )
        seen = x if self.kernel_size == 1 else without(x, weights)
        weight = self.weight.reshape(self.channels, self.channels, *(self.kernel_size,) * axes)
        convolution = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
        y = convolution(
            seen.transpose(-2, -1).unflatten(-1, spatial), weight, self.offset, padding=self.kernel_size // 2
        )
        y = y.flatten(2).transpose(-2, -1)
        return x + y if self.residual else y
