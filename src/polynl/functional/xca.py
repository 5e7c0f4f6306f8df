"""Cross-covariance attention (El-Nouby 2021): attention between channels, from their covariances."""

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.efficient import sums_by_head
from polynl.functional.gram import sizes_are_open
from polynl.functional.poly_nl import sum_of_products

SHORTEST = 1e-12  # the length by which shorter vectors are divided, as in torch's normalize


def xca_sums(
    q: Float[Tensor, "b n d"],
    k: Float[Tensor, "b n d"],
    heads: int,
    weights: Float[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b h dh dh"], Float[Tensor, "b h dh"], Float[Tensor, "b h dh"]]:
    """For each head Σⱼ mⱼ qⱼkⱼᵀ, and Σⱼ mⱼ qⱼ² and Σⱼ mⱼ kⱼ², in fp32 at least."""
    squares = (sum_of_products(t, t, weights).unflatten(-1, (heads, -1)) for t in (q, k))
    return sums_by_head(q, k, heads, weights), next(squares), next(squares)


def channel_attention(
    products: Float[Tensor, "b h dh dh"],
    q_squares: Float[Tensor, "b h dh"],
    k_squares: Float[Tensor, "b h dh"],
    temperature: Float[Tensor, "h 1 1"],
) -> Float[Tensor, "b h dh dh"]:
    """A = softmax(τ q̂ᵀk̂) over the channels of k, where q̂ and k̂ have unit length over positions."""
    q_norms, k_norms = (t.clamp_min(SHORTEST**2).sqrt() for t in (q_squares, k_squares))
    cosines = products / q_norms.unsqueeze(-1) / k_norms.unsqueeze(-2)
    return (cosines * temperature).softmax(dim=-1)


def xca_mixing(
    gram: Float[Tensor, "b c c"],
    w_q: Float[Tensor, "d c"],
    w_k: Float[Tensor, "d c"],
    w_v: Float[Tensor, "d c"],
    w_out: Float[Tensor, "c d"],
    temperature: Float[Tensor, "h 1 1"],
) -> Float[Tensor, "b c c"]:
    """M(G), not linear in G, with which the block's Y = X·M(G). The matrices are (out, in).

    Σ qkᵀ = W_q G W_kᵀ and Σ q² = diag(W_q G W_qᵀ), up to the N that unit length cancels.
    """
    heads, dtype = temperature.shape[0], torch.promote_types(gram.dtype, w_q.dtype)
    q, k, v = (w.to(dtype).unflatten(0, (heads, -1)) for w in (w_q, w_k, w_v))
    q_gram, k_gram = q @ gram.unsqueeze(1), k @ gram.unsqueeze(1)
    squares = ((projected * w).sum(dim=-1) for projected, w in ((q_gram, q), (k_gram, k)))
    attention = channel_attention(q_gram @ k.transpose(-2, -1), next(squares), next(squares), temperature)
    return (attention @ v).flatten(1, 2).transpose(-2, -1) @ w_out.to(dtype).transpose(-2, -1)


def xca_is_cheaper_through_gram(x: Float[Tensor, "b n c"], heads: int) -> bool:
    """Whether X·(I + M(G)) takes fewer multiply-adds than the four projections and the heads' products."""
    if sizes_are_open():
        return False
    n, c = x.shape[-2:]
    return 2 * n * c * c + c**3 * (3 + 2 / heads) < n * c * c * (4 + 2 / heads)


# The literal reference: fp64, one sample (n, c), no code shared with the fast form. Only tests may use it.


def xca_reference(
    q: Float[Tensor, "m d"],
    k: Float[Tensor, "m d"],
    v: Float[Tensor, "n d"],
    temperature: Float[Tensor, "h 1 1"],
) -> Float[Tensor, "n d"]:
    """XC(Q, K, V) = V softmax(K̂ᵀQ̂ / τ) per head (Eq. 2), with 1/τ learned, channel by channel."""
    q, k, v = (t.double() for t in (q, k, v))
    outputs = []
    heads = len(temperature)
    for h, (q_h, k_h, v_h) in enumerate(
        zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True)
    ):
        for channel in q_h.T:
            cosines = torch.stack([channel @ other / (channel.norm() * other.norm()) for other in k_h.T])
            outputs.append(v_h @ (cosines * temperature[h, 0, 0]).softmax(dim=0))
    return torch.stack(outputs, dim=1)
