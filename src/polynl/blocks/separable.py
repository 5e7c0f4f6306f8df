"""The separable self-attention of MobileViTv2 (Mehta 2022) as a block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.attention import AttentionBlock
from polynl.blocks.base import Device, Init, factory_of
from polynl.blocks.options import flag, residual_flag, width
from polynl.blocks.pointwise import PointwiseNorm, projected
from polynl.functional.efficient import softmax_sums_by_head
from polynl.functional.products import separable_attend
from polynl.functional.summary import SoftmaxSummary, Summary, counted


class SeparableAttention(AttentionBlock):
    """Z = X + Y W_out with Y = ReLU(v) ⊙ c, where c = Σⱼ softmaxⱼ(xⱼ·w) kⱼ is one vector of the map.

    k = XW_k and v = XW_v have the width `inner_channels` (default: channels). Every projection has a bias;
    `bias=False` removes it. The published module has `residual=False`; it takes patches apart and
    attends over those pixels that have the same place in their patches. Here, all positions are one set.

    The summary holds the sums of e^s and of e^s k, s = xⱼ·w.

    Identity: W_out and its bias are zero; they receive gradient at once, the rest after the first step.
    """

    def __init__(
        self,
        channels: int,
        *,
        inner_channels: int | None = None,
        bias: bool = True,
        residual: bool = True,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.inner_channels = inner = width("inner_channels", inner_channels, channels)
        self.bias = flag("bias", bias)
        self.residual = residual_flag(residual, init)
        factory = factory_of(device, dtype)
        self.scores = nn.Linear(channels, 1, bias=bias, **factory)
        self.keys = nn.Linear(channels, inner, bias=bias, **factory)
        self.values = nn.Linear(channels, inner, bias=bias, **factory)
        self.out = PointwiseNorm(inner, channels, bias=bias, zero=init == "identity", **factory)
        self.reset_parameters()

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """Two numbers and a vector."""
        return {"maximum": (1, 1), "exponentials": (1, 1), "values": (1, 1, self.inner_channels)}

    def queries_of(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """XW_v, which the paper calls values: it is what every position brings along."""
        return projected(self.values, x)

    def keys_and_values(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n 1"], Float[Tensor, "b n d"], Float[Tensor, "b n"] | None]:
        """The scores and XW_k, which is summed."""
        return projected(self.scores, x), projected(self.keys, x), weights

    def summary_of(
        self, k: Float[Tensor, "b n 1"], v: Float[Tensor, "b n d"], weights: Float[Tensor, "b n"] | None
    ) -> Summary:
        """The sums of the softmax."""
        sums = softmax_sums_by_head(k, v, 1, weights)
        names = ("maximum", "exponentials", "values")
        return SoftmaxSummary(counted(k, weights), dict(zip(names, sums, strict=True)))

    def attention(self, q: Float[Tensor, "b n d"], summary: Summary) -> Float[Tensor, "b n d"]:
        """ReLU(v) ⊙ c."""
        return separable_attend(q, summary.mean("values").flatten(1))
