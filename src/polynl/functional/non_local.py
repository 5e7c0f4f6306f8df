"""The pairwise functions of the Non-local block (Wang 2018): every position attends to every key.

θ are the queries (b, n, d), φ the keys (b, m, d), g the values (b, m, e); m < n if keys are sub-sampled.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from polynl.functional.gram import gram, mix, sizes_are_open

DotProductForm = Literal["gram", "quadratic"]


def dot_product_attention(
    theta: Float[Tensor, "b n d"],
    phi: Float[Tensor, "b m d"],
    g: Float[Tensor, "b m e"],
    form: DotProductForm = "gram",
) -> Float[Tensor, "b n e"]:
    """Y = θ φᵀ g / M, Eq. 2 divided by the number of keys M.

    * ``quadratic`` multiplies left to right, as published, through the N×M similarities.
    * ``gram`` multiplies right to left: the same values at a cost linear in N and M.
    """
    if form == "gram":
        return mix(theta, gram(phi, g))
    return (theta @ phi.transpose(-2, -1) / phi.shape[-2]) @ g


def dot_product_mixing(
    gram: Float[Tensor, "b c c"],
    w_theta: Float[Tensor, "d c"],
    w_phi: Float[Tensor, "d c"],
    w_g: Float[Tensor, "e c"],
    w_out: Float[Tensor, "c e"],
) -> Float[Tensor, "b c c"]:
    """M(G) = Wθ Wφᵀ G W_g W_out, so that the block's Y = X·M(G). Linear in G; the matrices are (out, in)."""
    dtype = torch.promote_types(gram.dtype, w_theta.dtype)
    left = w_theta.to(dtype).transpose(-2, -1) @ w_phi.to(dtype)
    right = (w_out.to(dtype) @ w_g.to(dtype)).transpose(-2, -1)
    return left @ gram.to(dtype) @ right


def cheaper_through_gram(x: Float[Tensor, "b n c"], inner: int) -> bool:
    """Whether X·(I + M(G)) takes fewer multiply-adds than θ(φᵀg), from projections to `inner` and back."""
    if sizes_are_open():
        return False
    b, n, c = x.shape
    projected = b * n * (4 * c * inner + 2 * inner * inner)
    through_gram = b * (2 * n * c * c + 2 * c**3) + 2 * c * c * inner
    return through_gram < projected


def softmax_attention(
    theta: Float[Tensor, "b n d"],
    phi: Float[Tensor, "b m d"],
    g: Float[Tensor, "b m e"],
    scale: float = 1.0,
    weights: Float[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b n e"]:
    """Y = softmax(scale · θ φᵀ) g over the keys, Gaussian and embedded Gaussian: 2nm·d multiply-adds.

    `weights` multiply the exponentials of the keys; where all are zero, or there is no key, Y is zero.

    torch's fused attention never stores the N×M scores but has no second derivative; fp64, which is used to
    check derivatives and not to train, takes the plain formula. The fused kernels need contiguous operands
    of one width; otherwise torch silently falls back to storing the scores.
    """
    bias = None if weights is None else _log_weights(weights).unsqueeze(-2)
    if theta.dtype == torch.float64:
        scores = theta @ phi.transpose(-2, -1) * scale
        y = torch.softmax(scores if bias is None else scores + bias, dim=-1) @ g
    elif not sizes_are_open() and phi.shape[-2] == 0:
        y = theta.new_zeros(*theta.shape[:-1], g.shape[-1])
    else:
        width = max(theta.shape[-1], g.shape[-1])
        # ONNX knows attention only with an axis of heads.
        q, k, v = (_padded(t, width).unsqueeze(1) for t in (theta, phi, g))
        mask = None if bias is None else bias.unsqueeze(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        y = y.squeeze(1)[..., : g.shape[-1]]
    return y if weights is None else y * weights.any(dim=-1)[:, None, None]


def _log_weights(weights: Float[Tensor, "b m"]) -> Float[Tensor, "b m"]:
    """log w, and instead of −∞ a number so low that its exponential is zero beside any other score.

    If all weights of a softmax were −∞, it and its gradients would be NaN.
    """
    nothing = weights == 0
    return weights.masked_fill(nothing, 1).log().masked_fill(nothing, torch.finfo(weights.dtype).min / 2)


def _padded(x: Float[Tensor, "b n d"], width: int) -> Float[Tensor, "b n w"]:
    """A contiguous X, zero-padded to `width`: zeros change no score, and they are cut off from the result."""
    return x.contiguous() if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])).contiguous()


def concatenation_attention(
    theta: Float[Tensor, "b n d"],
    phi: Float[Tensor, "b m d"],
    g: Float[Tensor, "b m e"],
    w: Float[Tensor, " two_d"],
    weights: Float[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b n e"]:
    """Σⱼ ReLU(wᵀ[θᵢ, φⱼ]) gⱼ over the keys; `weights` multiply their summands.

    wᵀ[θᵢ, φⱼ] = aᵢ + bⱼ with a = θ w[:d] and b = φ w[d:], so the 2D×N×M concatenation is never stored.
    """
    # Matrices of one column: ONNX Runtime's optimizer breaks products with vectors.
    w_theta, w_phi = w.unsqueeze(-1).chunk(2)
    scores = (theta @ w_theta + (phi @ w_phi).transpose(-2, -1)).relu()
    return (scores if weights is None else scores * weights.unsqueeze(-2)) @ g


# The literal references: fp64, one sample (n, c), no code shared with the fast form. Only tests may use them.


def non_local_reference(
    x: Float[Tensor, "n c"],
    w_theta: Float[Tensor, "c k"],
    w_phi: Float[Tensor, "c k"],
    w_g: Float[Tensor, "c v"],
) -> Float[Tensor, "n v"]:
    """Dot product, not divided by N (Eq. 2): Y = (X W_θ W_φᵀ Xᵀ)(X W_g), with the N×N matrix in full."""
    x, w_theta, w_phi, w_g = (t.double() for t in (x, w_theta, w_phi, w_g))
    similarity = (x @ w_theta) @ (x @ w_phi).T
    return similarity @ (x @ w_g)


def non_local_elementwise_reference(
    x: Float[Tensor, "n c"], w_f: Float[Tensor, "c c"], w_g: Float[Tensor, "c v"]
) -> Float[Tensor, "n v"]:
    """Eq. 2 element by element, Eq. 8.

    y(a,b) = Σ_{d,f,h} Σ_e w_f(d,f) w_g(h,b) x(a,d) x(e,f) x(e,h), where W_f = W_θ W_φᵀ.
    """
    x, w_f, w_g = (t.double() for t in (x, w_f, w_g))
    return torch.einsum("df,hb,ad,ef,eh->ab", w_f, w_g, x, x, x)


def softmax_attention_reference(
    theta: Float[Tensor, "n k"], phi: Float[Tensor, "m k"], g: Float[Tensor, "m v"], scale: float
) -> Float[Tensor, "n v"]:
    """Gaussian modes: y_i = Σ_j softmax_j(scale · θ_i·φ_j) g_j."""
    theta, phi, g = (t.double() for t in (theta, phi, g))
    return torch.softmax(scale * (theta @ phi.T), dim=1) @ g


def concatenation_attention_reference(
    theta: Float[Tensor, "n k"],
    phi: Float[Tensor, "m k"],
    g: Float[Tensor, "m v"],
    w: Float[Tensor, " two_k"],
) -> Float[Tensor, "n v"]:
    """Concatenation mode: y_i = 1/M Σ_j ReLU(wᵀ[θ_i; φ_j]) g_j, where M is the number of keys."""
    theta, phi, g, w = (t.double() for t in (theta, phi, g, w))
    n, m = theta.shape[0], phi.shape[0]
    pairs = torch.cat([theta[:, None].expand(n, m, -1), phi[None].expand(n, m, -1)], dim=-1)
    return torch.relu(pairs @ w) @ g / m
