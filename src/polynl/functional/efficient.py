"""Efficient attention (Shen 2021): the product of Eq. 2 from right to left, with or without its softmaxes."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.gram import gram, mix

Normalization = Literal["softmax", "none"]
NORMALIZATIONS: tuple[Normalization, ...] = ("softmax", "none")


def efficient_attention(
    q: Float[Tensor, "b n d"],
    k: Float[Tensor, "b n d"],
    v: Float[Tensor, "b n e"],
    heads: int = 1,
    normalization: Normalization = "softmax",
) -> Float[Tensor, "b n e"]:
    """Attention of each head from right to left, channels head-major: 2n·d·e / heads multiply-adds.

    * ``softmax``: Y = ρ(q) (σ(k)ᵀ v), ρ a softmax over the channels of a head and σ one over the positions.
    * ``none``: Y = q (kᵀ v) / N, the unnormalised product that the Poly-NL paper describes.
    """
    b = q.shape[0]
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    if normalization == "softmax":
        y = mix(q.softmax(dim=-1), torch.bmm(k.softmax(dim=-2).mT, v))
    else:
        y = mix(q, gram(k, v))
    return y.unflatten(0, (b, heads)).transpose(1, 2).flatten(2)
