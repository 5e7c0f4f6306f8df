"""Efficient attention (Shen 2021): the product of Eq. 2 from right to left, with or without its softmaxes."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.gram import gram, mix

Normalization = Literal["softmax", "none"]


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


# The literal reference: fp64, one sample (n, c), no code shared with the fast form. Only tests may use it.


def efficient_attention_reference(
    q: Float[Tensor, "n k"],
    k: Float[Tensor, "m k"],
    v: Float[Tensor, "m v"],
    heads: int,
    normalization: Normalization,
) -> Float[Tensor, "n v"]:
    """Left to right, through the N×M matrix that the block exists to avoid; a head is a slice of channels.

    * ``softmax``: Y_h = ρ_q(Q_h) ρ_k(K_h)ᵀ V_h, ρ_q a softmax over the head's channels, ρ_k over positions.
    * ``none``: Y_h = Q_h K_hᵀ V_h / M, Eq. 2 divided by the number of keys M.
    """
    q, k, v = (t.double() for t in (q, k, v))
    outputs = []
    for q_h, k_h, v_h in zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True):
        if normalization == "softmax":
            outputs.append(torch.softmax(q_h, dim=1) @ torch.softmax(k_h, dim=0).T @ v_h)
        else:
            outputs.append(q_h @ k_h.T @ v_h / k.shape[0])
    return torch.cat(outputs, dim=1)
