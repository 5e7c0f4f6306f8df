"""Efficient attention (Shen 2021) as a block: Efficient-NL in the paper's tables."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.attention import AttentionBlock
from polynl.blocks.base import Device, Init, factory_of
from polynl.blocks.options import choice, divides, flag, width
from polynl.blocks.pointwise import PointwiseNorm, is_bare, projected
from polynl.functional.efficient import (
    Normalization,
    attend_by_head,
    efficient_attention,
    softmax_sums_by_head,
    sums_by_head,
)
from polynl.functional.gram import mix_by_gram
from polynl.functional.non_local import cheaper_through_gram, dot_product_mixing
from polynl.functional.summary import SoftmaxSummary, Summary, counted


class EfficientNL(AttentionBlock):
    """Z = X + Y W_out with Y the attention of q = XW_q, k = XW_k, v = XW_v, from right to left.

    See :func:`polynl.functional.efficient_attention`: `normalization` "softmax" is the published module,
    "none" the unnormalised product of the paper's Eq. 2. `key_channels` and `value_channels` (default:
    channels // 2) must be divisible by `heads`.

    The summary holds a matrix per head, Σⱼ kⱼvⱼᵀ, or with the softmax the sums of e^k and of e^k vᵀ.

    Identity: W_out and its bias are zero; they receive gradient at once, the rest after the first step.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int = 1,
        normalization: Normalization = "softmax",
        key_channels: int | None = None,
        value_channels: int | None = None,
        bias: bool = True,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.normalization = choice("normalization", normalization, Normalization)
        self.key_channels = width("key_channels", key_channels, channels // 2)
        self.value_channels = width("value_channels", value_channels, channels // 2)
        divides("heads", heads, "key_channels", self.key_channels)
        self.heads = divides("heads", heads, "value_channels", self.value_channels)
        self.bias = flag("bias", bias)
        factory = factory_of(device, dtype)
        self.queries = nn.Linear(channels, self.key_channels, bias=bias, **factory)
        self.keys = nn.Linear(channels, self.key_channels, bias=bias, **factory)
        self.values = nn.Linear(channels, self.value_channels, bias=bias, **factory)
        zero = init == "identity"
        self.out = PointwiseNorm(self.value_channels, channels, bias=bias, zero=zero, **factory)
        self.reset_parameters()

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A matrix per head and, with the softmax, two vectors."""
        d, e = self.key_channels // self.heads, self.value_channels // self.heads
        vector, matrix = (self.heads, d), (self.heads, d, e)
        if self.normalization == "none":
            return {"values": matrix}
        return {"maximum": vector, "exponentials": vector, "values": matrix}

    def queries_of(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """XW_q."""
        return projected(self.queries, x)

    def keys_and_values(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n e"], Float[Tensor, "b n"] | None]:
        """XW_k and XW_v, of every position."""
        return projected(self.keys, x), projected(self.values, x), weights

    def summary_of(
        self, k: Float[Tensor, "b n d"], v: Float[Tensor, "b n e"], weights: Float[Tensor, "b n"] | None
    ) -> Summary:
        """The sums of each head."""
        count = counted(k, weights)
        if self.normalization == "none":
            return Summary(count, {"values": sums_by_head(k, v, self.heads, weights)})
        names = ("maximum", "exponentials", "values")
        sums = softmax_sums_by_head(k, v, self.heads, weights)
        return SoftmaxSummary(count, dict(zip(names, sums, strict=True)))

    def attention(self, q: Float[Tensor, "b n d"], summary: Summary) -> Float[Tensor, "b n e"]:
        """The queries times the mean of each head, weighted by the softmax if there is one."""
        return attend_by_head(q, summary.mean("values"), self.normalization)

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        if weights is not None:
            return super()._transform(x, spatial, weights)
        if self.normalization == "softmax":
            k, v, _ = self.keys_and_values(x, spatial)
            return x + self.out(efficient_attention(self.queries_of(x), k, v, self.heads))
        if self._mixes and cheaper_through_gram(x, max(self.key_channels, self.value_channels)):
            return mix_by_gram(x, self._mixing)
        return super()._transform(x, spatial)

    @property
    def _mixes(self) -> bool:
        """Whether Y = X·M(G) with M = `_mixing` and G the Gram matrix of X."""
        return not self.bias and is_bare(self.queries, self.keys, self.values, self.out)

    def _mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        """M(G), with which Y = X·M(G) without biases: the sum of the heads' matrices."""
        q, k, v = (
            layer.weight.unflatten(0, (self.heads, -1)) for layer in (self.queries, self.keys, self.values)
        )
        out = self.out.weight.unflatten(1, (self.heads, -1)).movedim(1, 0)
        return dot_product_mixing(gram.unsqueeze(-3), q, k, v, out).sum(dim=-3)
