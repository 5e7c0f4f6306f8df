"""Efficient attention (Shen 2021) as a block: Efficient-NL in the paper's tables."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.blocks.base import AttentionBlock, Init, Pointwise, PointwiseNorm, choice, divides, flag, width
from polynl.functional.efficient import Normalization, efficient_attention
from polynl.functional.gram import mix_by_gram
from polynl.functional.non_local import cheaper_through_gram, dot_product_mixing


class EfficientNL(AttentionBlock):
    """Z = X + Y W_out with Y the attention of q = XW_q, k = XW_k, v = XW_v, from right to left.

    See :func:`polynl.functional.efficient_attention`: `normalization` "softmax" is the published module,
    "none" the unnormalised product of the paper's Eq. 2. `key_channels` and `value_channels` (default:
    channels // 2) must be divisible by `heads`.

    Identity: W_out and its bias are zero; they receive gradient at once, the rest after the first step.
    """

    mixes_with: ClassVar = {"normalization": "none", "bias": False}

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
    ) -> None:
        super().__init__(channels, init)
        self.normalization = choice("normalization", normalization, Normalization)
        self.key_channels = width("key_channels", key_channels, channels // 2)
        self.value_channels = width("value_channels", value_channels, channels // 2)
        divides("heads", heads, "key_channels", self.key_channels)
        self.heads = divides("heads", heads, "value_channels", self.value_channels)
        self.bias = flag("bias", bias)
        self.queries = Pointwise(channels, self.key_channels, bias=bias)
        self.keys = Pointwise(channels, self.key_channels, bias=bias)
        self.values = Pointwise(channels, self.value_channels, bias=bias)
        self.out = PointwiseNorm(self.value_channels, channels, bias=bias, norm="none")
        if init == "identity":
            self.out.zero()

    def transform(self, x: Float[Tensor, "b n c"], spatial: torch.Size) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        if self.mixes and cheaper_through_gram(x, max(self.key_channels, self.value_channels)):
            return mix_by_gram(x, self.mixing)
        return super().transform(x, spatial)

    def projections(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n d"], Float[Tensor, "b n e"]]:
        """Queries, keys and values of every position."""
        return self.queries(x), self.keys(x), self.values(x)

    def attention(
        self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b m d"], v: Float[Tensor, "b m e"]
    ) -> Float[Tensor, "b n e"]:
        """See :func:`polynl.functional.efficient_attention`."""
        return efficient_attention(q, k, v, self.heads, self.normalization)

    def _mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        """The sum of the heads' matrices."""
        q, k, v = (
            layer.weight.unflatten(0, (self.heads, -1)).mT for layer in (self.queries, self.keys, self.values)
        )
        out = self.out.linear.weight.mT.unflatten(0, (self.heads, -1))
        return dot_product_mixing(gram.unsqueeze(-3), q, k, v, out).sum(dim=-3)
