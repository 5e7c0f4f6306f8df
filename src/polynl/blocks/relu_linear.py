"""The ReLU linear attention of EfficientViT (Cai 2023) as a block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.attention import AttentionBlock
from polynl.blocks.base import Device, Init, factory_of
from polynl.blocks.options import choice, divides, flag, residual_flag, width
from polynl.blocks.pointwise import Norm, PointwiseNorm, projected
from polynl.functional.relu_linear import relu_linear_attend, relu_linear_sums
from polynl.functional.summary import Summary, counted


class ReLULinearAttention(AttentionBlock):
    """Z = X + norm(Y W_out) with Y = q(kᵀv) / (q Σk) in each of `heads`, q = ReLU(XW_q) and k = ReLU(XW_k).

    Attention whose similarity of i and j is qᵢ·kⱼ, never negative, so that the weights of all positions sum
    to 1 as those of a softmax do. It is the attention of EfficientViT's LiteMLA without its convolutions at
    several scales; the published module has `norm="batch"` and `residual=False`. `inner_channels` is the
    width of q, k and v (default: channels) and must be divisible by `heads`.

    The summary holds Σⱼ kⱼvⱼᵀ and Σⱼ kⱼ of each head.

    Identity: the scale of the batch norm, or else W_out, is zero; it receives gradient at once, the rest
    after the first step.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int = 1,
        inner_channels: int | None = None,
        norm: Norm = "none",
        bias: bool = False,
        residual: bool = True,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.inner_channels = inner = width("inner_channels", inner_channels, channels)
        self.heads = divides("heads", heads, "inner_channels", inner)
        self.norm = choice("norm", norm, Norm)
        self.bias = flag("bias", bias)
        self.residual = residual_flag(residual, init)
        factory = factory_of(device, dtype)
        self.q = nn.Linear(channels, inner, bias=bias, **factory)
        self.k = nn.Linear(channels, inner, bias=bias, **factory)
        self.v = nn.Linear(channels, inner, bias=bias, **factory)
        self.out = PointwiseNorm(inner, channels, bias=bias, norm=norm, zero=init == "identity", **factory)
        self.reset_parameters()

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A vector and a matrix per head."""
        width = self.inner_channels // self.heads
        return {"keys": (self.heads, width), "values": (self.heads, width, width)}

    def queries_of(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """XW_q."""
        return projected(self.q, x)

    def keys_and_values(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"], Float[Tensor, "b n"] | None]:
        """XW_k and XW_v."""
        return projected(self.k, x), projected(self.v, x), weights

    def summary_of(
        self, k: Float[Tensor, "b n d"], v: Float[Tensor, "b n d"], weights: Float[Tensor, "b n"] | None
    ) -> Summary:
        """The sums of each head."""
        sums = relu_linear_sums(k, v, self.heads, weights)
        return Summary(counted(k, weights), dict(zip(("keys", "values"), sums, strict=True)))

    def attention(self, q: Float[Tensor, "b n d"], summary: Summary) -> Float[Tensor, "b n d"]:
        """The mean of the values, weighted by similarity."""
        return relu_linear_attend(q, summary.parts["keys"], summary.parts["values"])
