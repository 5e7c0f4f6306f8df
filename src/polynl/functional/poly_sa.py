"""Poly-SA, the follow-up of Poly-NL for transformers, as far as it is known: see `polynl.blocks.poly_sa`."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def poly_sa(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n d"],
    p1: Float[Tensor, "h n"],
    p2: Float[Tensor, "h n"],
    weight: Float[Tensor, " d"],
    bias: Float[Tensor, " d"],
    eps: float = 1e-5,
) -> Float[Tensor, "b h n d"]:
    """qᵢ ⊙ p₁ᵢ · LN(Σⱼ p₂ⱼ kⱼ ⊙ vⱼ) in every head; the sum and the norm are computed in fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    pooled = (p2.unsqueeze(-1).to(wide) * k * v).sum(dim=-2, keepdim=True)
    context = F.layer_norm(pooled, weight.shape, weight.to(wide), bias.to(wide), eps)
    return q * (p1.unsqueeze(-1) * context).to(q.dtype)


# The literal reference: fp64, one head of one sample (n, d), no code shared with the fast form.


def poly_sa_reference(
    q: Float[Tensor, "n d"],
    k: Float[Tensor, "n d"],
    v: Float[Tensor, "n d"],
    p1: Float[Tensor, " n"],
    p2: Float[Tensor, " n"],
    weight: Float[Tensor, " d"],
    bias: Float[Tensor, " d"],
    eps: float = 1e-5,
) -> Float[Tensor, "n d"]:
    """qᵢ ⊙ p₁ᵢ · LN(Σⱼ p₂ⱼ kⱼ ⊙ vⱼ), position by position."""
    q, k, v, p1, p2, weight, bias = (t.double() for t in (q, k, v, p1, p2, weight, bias))
    pooled = torch.zeros_like(q[0])
    for key, value, factor in zip(k, v, p2, strict=True):
        pooled = pooled + factor * key * value
    centred = pooled - pooled.sum() / len(pooled)
    context = weight * centred / ((centred**2).sum() / len(pooled) + eps) ** 0.5 + bias
    return torch.stack([query * factor * context for query, factor in zip(q, p1, strict=True)])
