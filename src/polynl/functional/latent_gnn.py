"""Latent-GNN (Zhang 2019): positions communicate through a few latent nodes."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.gram import mix, outer_sum

# Vectors are divided by no less than this.
SHORTEST = 1e-12


def latent_gnn(
    v: Float[Tensor, "b n c"],
    to_latent: Float[Tensor, "b n d"],
    from_latent: Float[Tensor, "b n d"] | None = None,
) -> Float[Tensor, "b n c"]:
    """One kernel with d latent nodes: 2n·c·d multiply-adds over the positions, 2c·d² among the nodes.

    a = ReLU(to_latent) and b = ReLU(from_latent) connect positions and nodes, normalised to unit length: b at
    each position, a over the positions of each node. Without `from_latent` the kernel is symmetric: b = a,
    of unit length at each position. Then

        Z = aᵀv,   Z ← softmax(ẐẐᵀ) Z with rows of Ẑ of unit length,   Y = bZ.

    aᵀv is a sum over positions, so Y grows with the map as √N (asymmetric) or N (symmetric).
    """
    nodes, squares = latent_sums(v, to_latent, symmetric=from_latent is None)
    return latent_attend(to_latent if from_latent is None else from_latent, nodes, squares)


def latent_sums(
    v: Float[Tensor, "b n c"],
    to_latent: Float[Tensor, "b n d"],
    weights: Float[Tensor, "b n"] | None = None,
    *,
    symmetric: bool,
) -> tuple[Float[Tensor, "b d c"], Float[Tensor, "b d"] | None]:
    """aᵀv and, in an asymmetric kernel, where a is not yet normalised, Σⱼ aⱼ²; each position with its weight.

    In fp32 at least.
    """
    a = to_latent.relu()
    a = unit_length(a, dim=-1) if symmetric else a
    weighted = a if weights is None else a * weights.unsqueeze(-1)
    dtype = torch.promote_types(a.dtype, torch.float32)
    squares = None if symmetric else (weighted.to(dtype) * a.to(dtype)).sum(dim=-2)
    return outer_sum(weighted, v), squares


def latent_attend(
    from_latent: Float[Tensor, "b n d"],
    nodes: Float[Tensor, "b d c"],
    squares: Float[Tensor, "b d"] | None = None,
) -> Float[Tensor, "b n c"]:
    """The nodes of any map, normalised by √`squares`, exchange what they hold, and go back to positions."""
    b = unit_length(from_latent.relu(), dim=-1)
    if squares is not None:
        nodes = nodes / squares.clamp_min(SHORTEST**2).sqrt().unsqueeze(-1)
    directions = unit_length(nodes, dim=-1)
    return mix(b, torch.softmax(directions @ directions.transpose(-2, -1), dim=-1) @ nodes)


def unit_length(x: Float[Tensor, "*b"], dim: int) -> Float[Tensor, "*b"]:
    """X divided by its L2 norm along `dim`, or by 1e-12 if the norm is smaller.

    `F.normalize` is the same, but its second derivative is NaN at zero vectors, which ReLU produces.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # 1e-12 is zero in fp16
    return (wide / wide.square().sum(dim=dim, keepdim=True).clamp_min(SHORTEST**2).sqrt()).to(x.dtype)


# The literal reference: fp64, one sample (n, c), no code shared with the fast form. Only tests may use it.


def latent_gnn_reference(
    v: Float[Tensor, "n c"],
    to_latent: Float[Tensor, "n d"],
    from_latent: Float[Tensor, "n d"] | None = None,
) -> Float[Tensor, "n c"]:
    """One kernel, node by node and position by position, with a and b as in :func:`latent_gnn`.

    z_k = Σ_i a_ik v_i;  z′_k = Σ_l softmax_l(ẑ_k·ẑ_l) z_l, where ẑ = z / |z|;  y_i = Σ_k b_ik z′_k.
    """

    def unit(vectors: Iterable[Tensor]) -> list[Tensor]:
        return [vector / vector.norm().clamp_min(1e-12) for vector in vectors]

    v, to_latent = v.double(), torch.relu(to_latent.double())
    if from_latent is None:
        a = b = torch.stack(unit(to_latent))
    else:
        a = torch.stack(unit(to_latent.T), dim=1)
        b = torch.stack(unit(torch.relu(from_latent.double())))
    nodes = [(a_k[:, None] * v).sum(dim=0) for a_k in a.T]
    directions = unit(nodes)
    mixed = []
    for direction in directions:
        weights = torch.stack([direction @ other for other in directions]).exp()
        mixed.append(sum(weight / weights.sum() * z for weight, z in zip(weights, nodes, strict=True)))
    return torch.stack([sum(b_ik * z for b_ik, z in zip(b_i, mixed, strict=True)) for b_i in b])
