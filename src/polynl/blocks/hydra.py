"""Hydra attention (Bolya 2022) as a block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.attention import AttentionBlock
from polynl.blocks.base import Device, Init, factory_of
from polynl.blocks.options import choice, flag, residual_flag, width
from polynl.blocks.pointwise import PointwiseNorm, projected
from polynl.functional.products import HydraNormalization, hydra_attend, hydra_sum
from polynl.functional.summary import Summary, counted


class HydraAttention(AttentionBlock):
    """Z = X + Y W_out with Y = q̂ ⊙ Σⱼ k̂ⱼ ⊙ vⱼ: linear attention with as many heads as channels.

    q = XW_q, k = XW_k and v = XW_v have the width `inner_channels` (default: channels).
    `normalization="cosine"`, as published, gives every query and key unit length; the sum is not divided by N
    and so grows with the map. With "none", Y = q ⊙ Φ(k ⊙ v), which is the branch of Poly-NL with a projection
    of X inside. Every projection has a bias; `bias=False` removes it. `residual=False` leaves X out.

    The summary is Σⱼ k̂ⱼ ⊙ vⱼ, a vector of the inner width.

    Identity: W_out and its bias are zero; they receive gradient at once, the rest after the first step.
    """

    def __init__(
        self,
        channels: int,
        *,
        inner_channels: int | None = None,
        normalization: HydraNormalization = "cosine",
        bias: bool = True,
        residual: bool = True,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.inner_channels = inner = width("inner_channels", inner_channels, channels)
        self.normalization = choice("normalization", normalization, HydraNormalization)
        self.bias = flag("bias", bias)
        self.residual = residual_flag(residual, init)
        factory = factory_of(device, dtype)
        self.query = nn.Linear(channels, inner, bias=bias, **factory)
        self.key = nn.Linear(channels, inner, bias=bias, **factory)
        self.value = nn.Linear(channels, inner, bias=bias, **factory)
        self.out = PointwiseNorm(inner, channels, bias=bias, zero=init == "identity", **factory)
        self.reset_parameters()

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A vector of the inner width."""
        return {"products": (self.inner_channels,)}

    def queries_of(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """XW_q."""
        return projected(self.query, x)

    def keys_and_values(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"], Float[Tensor, "b n"] | None]:
        """XW_k and XW_v."""
        return projected(self.key, x), projected(self.value, x), weights

    def summary_of(
        self, k: Float[Tensor, "b n d"], v: Float[Tensor, "b n d"], weights: Float[Tensor, "b n"] | None
    ) -> Summary:
        """The sum of the products."""
        return Summary(counted(k, weights), {"products": hydra_sum(k, v, self.normalization, weights)})

    def attention(self, q: Float[Tensor, "b n d"], summary: Summary) -> Float[Tensor, "b n d"]:
        """The queries times the sum, or with "none" times the mean."""
        cosine = self.normalization == "cosine"
        pooled = summary.parts["products"] if cosine else summary.mean("products")
        return hydra_attend(q, pooled, self.normalization)
