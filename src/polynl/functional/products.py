"""Attention by element-wise products with one vector of the whole map: MobileViTv2's and Hydra."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.latent_gnn import unit_length
from polynl.functional.poly_nl import sum_of_products

HydraNormalization = Literal["cosine", "none"]


def separable_attend(values: Float[Tensor, "b n c"], context: Float[Tensor, "b c"]) -> Float[Tensor, "b n c"]:
    """ReLU(v) ⊙ the context, which is the mean of the keys by the softmax of the scores over positions."""
    return values.relu() * context.to(values.dtype).unsqueeze(-2)


def hydra_sum(
    k: Float[Tensor, "b n d"],
    v: Float[Tensor, "b n d"],
    normalization: HydraNormalization = "cosine",
    weights: Float[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b d"]:
    """Σⱼ mⱼ k̂ⱼ ⊙ vⱼ in fp32 at least; "cosine" gives every key unit length."""
    return sum_of_products(unit_length(k, -1) if normalization == "cosine" else k, v, weights)


def hydra_attend(
    q: Float[Tensor, "b n d"], pooled: Float[Tensor, "b d"], normalization: HydraNormalization = "cosine"
) -> Float[Tensor, "b n d"]:
    """q̂ ⊙ the pooled products."""
    q = unit_length(q, -1) if normalization == "cosine" else q
    return q * pooled.to(q.dtype).unsqueeze(-2)


# The literal references: fp64, one sample (n, c), no code shared with the fast form. Only tests may use them.


def separable_reference(
    scores: Float[Tensor, "m 1"], keys: Float[Tensor, "m c"], values: Float[Tensor, "n c"]
) -> Float[Tensor, "n c"]:
    """(Σ σ(XW_I) ⊙ XW_K) ⊙ ReLU(XW_V) with σ the softmax over positions (Mehta 2022, Eq. 2)."""
    scores, keys, values = (t.double() for t in (scores, keys, values))
    context = sum(key * weight for key, weight in zip(keys, scores[:, 0].softmax(dim=0), strict=True))
    return values.clamp_min(0) * context


def hydra_reference(
    q: Float[Tensor, "n d"],
    k: Float[Tensor, "m d"],
    v: Float[Tensor, "m d"],
    normalization: HydraNormalization,
) -> Float[Tensor, "n d"]:
    """As many heads as channels (Bolya 2022, Eq. 8): yᵢ = Σⱼ φ(qᵢ) ⊙ φ(kⱼ) ⊙ vⱼ, over all pairs.

    * ``cosine``: φ(x) = x / ‖x‖.
    * ``none``: φ(x) = x, and the sum is divided by the number of keys.
    """
    q, k, v = (t.double() for t in (q, k, v))
    if normalization == "cosine":
        q, k = (torch.stack([row / row.norm() for row in t]) for t in (q, k))
    pairs = q[:, None] * k[None] * v[None]
    return pairs.sum(dim=1) / (len(k) if normalization == "none" else 1)
