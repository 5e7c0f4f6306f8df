"""Efficient attention (Shen 2021): the product of Eq. 2 from right to left, with or without its softmaxes."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.gram import mix, outer_sum, sizes_are_open

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
    if normalization == "softmax":
        k, v = _by_head(k, heads), _by_head(v, heads)
        context = torch.bmm(k.softmax(dim=-2).transpose(-2, -1), v).unflatten(0, (-1, heads))
        return attend_by_head(q, context, normalization)
    return attend_by_head(q, sums_by_head(k, v, heads) / k.shape[-2], normalization)


def attend_by_head(
    q: Float[Tensor, "b n d"], context: Float[Tensor, "b h dh eh"], normalization: Normalization
) -> Float[Tensor, "b n e"]:
    """Queries, normalised over the channels of a head if "softmax", times the head's matrix."""
    heads = context.shape[1]
    q = _by_head(q, heads)
    y = mix(q.softmax(dim=-1) if normalization == "softmax" else q, context.flatten(0, 1))
    # Not the batch size of the context: the older ONNX exporter would write that of the example.
    return y.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


def sums_by_head(
    k: Float[Tensor, "b n d"],
    v: Float[Tensor, "b n e"],
    heads: int,
    weights: Float[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h dh eh"]:
    """Σⱼ mⱼ kⱼvⱼᵀ for each head, with the weights m of the positions, in fp32 at least."""
    k = k if weights is None else k * weights.unsqueeze(-1)
    return outer_sum(_by_head(k, heads), _by_head(v, heads)).unflatten(0, (-1, heads))


def softmax_sums_by_head(
    k: Float[Tensor, "b n d"],
    v: Float[Tensor, "b n e"],
    heads: int,
    weights: Float[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b h dh"], Float[Tensor, "b h dh"], Float[Tensor, "b h dh eh"]]:
    """For each head the maxima μ of the key channels, Σⱼ mⱼ e^(kⱼ − μ) and Σⱼ mⱼ e^(kⱼ − μ) vⱼᵀ.

    The result of a softmax does not depend on μ, so no gradient goes through it. Without positions, μ is the
    lowest number instead of −∞: differences of two stay numbers.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    k, v, lowest = k.to(wide), v.to(wide), torch.finfo(wide).min
    if weights is not None:
        k = k.masked_fill((weights == 0).unsqueeze(-1), lowest)
    if not sizes_are_open() and k.shape[-2] == 0:
        maximum = k.new_full((k.shape[0], k.shape[-1]), lowest)
    else:
        maximum = k.detach().amax(dim=-2)
    exponentials = (k - maximum.unsqueeze(-2)).exp()
    if weights is not None:
        exponentials = exponentials * weights.unsqueeze(-1)
    sums = exponentials.sum(dim=-2).unflatten(-1, (heads, -1))
    return maximum.unflatten(-1, (heads, -1)), sums, sums_by_head(exponentials, v, heads)


def _by_head(x: Float[Tensor, "b n d"], heads: int) -> Float[Tensor, "bh n dh"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


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
