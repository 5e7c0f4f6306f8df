"""ReLU linear attention (EfficientViT, Cai 2023): similarities ReLU(q)·ReLU(k), from right to left."""

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.efficient import attend_by_head, sums_by_head
from polynl.functional.gates import position_sum

EPSILON = 1e-5  # as in timm's LiteMLA


def relu_linear_sums(
    k: Float[Tensor, "b n d"],
    v: Float[Tensor, "b n e"],
    heads: int,
    weights: Float[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b h dh"], Float[Tensor, "b h dh eh"]]:
    """For each head Σⱼ mⱼ ReLU(kⱼ) and Σⱼ mⱼ ReLU(kⱼ)vⱼᵀ, in fp32 at least."""
    k = k.relu()
    return position_sum(k, weights).unflatten(-1, (heads, -1)), sums_by_head(k, v, heads, weights)


def relu_linear_attend(
    q: Float[Tensor, "b n d"], keys: Float[Tensor, "b h dh"], values: Float[Tensor, "b h dh eh"]
) -> Float[Tensor, "b n e"]:
    """ReLU(q) Σ kvᵀ / (ReLU(q) Σ k + 10⁻⁵) for each head: n·d·(e + heads) / heads multiply-adds."""
    # One product for both: the sum of the keys is one more column. Neither fits into half precision.
    columns = torch.cat([values, keys.unsqueeze(-1)], dim=-1)
    y = attend_by_head(q.relu().to(columns.dtype), columns, "none").unflatten(-1, (values.shape[1], -1))
    return (y[..., :-1] / (y[..., -1:] + EPSILON)).flatten(-2).to(q.dtype)


# The literal reference: fp64, one sample (n, c), no code shared with the fast form. Only tests may use it.


def relu_linear_reference(
    q: Float[Tensor, "n d"], k: Float[Tensor, "m d"], v: Float[Tensor, "m e"], heads: int
) -> Float[Tensor, "n e"]:
    """yᵢ = Σⱼ s(i,j) vⱼ / (Σⱼ s(i,j) + 10⁻⁵), s(i,j) = ReLU(qᵢ)·ReLU(kⱼ), with the N×M matrix in full."""
    q, k, v = (t.double() for t in (q, k, v))
    outputs = []
    for q_h, k_h, v_h in zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True):
        similarities = q_h.clamp_min(0) @ k_h.clamp_min(0).T
        outputs.append((similarities @ v_h) / (similarities.sum(dim=1, keepdim=True) + 1e-5))
    return torch.cat(outputs, dim=1)
