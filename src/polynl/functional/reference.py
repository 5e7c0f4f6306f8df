"""The definitions, literally, in fp64, on one sample X of shape (n, c).

Nothing here is fast and nothing is meant to be: each function is its formula and shares no code with the
fast forms, which tests compare with it in outputs and gradients. Only tests and benchmarks import this file.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


def non_local(
    x: Float[Tensor, "n c"],
    w_theta: Float[Tensor, "c k"],
    w_phi: Float[Tensor, "c k"],
    w_g: Float[Tensor, "c v"],
) -> Float[Tensor, "n v"]:
    """Non-local block, dot product, not divided by N (Eq. 2).

    Y = (X W_θ W_φᵀ Xᵀ)(X W_g), with the N×N matrix in full. Cost: O(N²C).
    """
    x, w_theta, w_phi, w_g = _fp64(x, w_theta, w_phi, w_g)
    similarity = (x @ w_theta) @ (x @ w_phi).T
    return similarity @ (x @ w_g)


def non_local_elementwise(
    x: Float[Tensor, "n c"], w_f: Float[Tensor, "c c"], w_g: Float[Tensor, "c v"]
) -> Float[Tensor, "n v"]:
    """Non-local block, dot product, element by element (Eq. 8).

    y(a,b) = Σ_{d,f,h} Σ_e w_f(d,f) w_g(h,b) x(a,d) x(e,f) x(e,h), where W_f = W_θ W_φᵀ.
    """
    x, w_f, w_g = _fp64(x, w_f, w_g)
    return torch.einsum("df,hb,ad,ef,eh->ab", w_f, w_g, x, x, x)


def poly_nl(
    x: Float[Tensor, "n c"],
    w1: Float[Tensor, "c c"],
    w2: Float[Tensor, "c c"],
    w3: Float[Tensor, "c v"],
) -> Float[Tensor, "n v"]:
    """Poly-NL (Eq. 6): Y = (Φ(X W₁ ⊙ X W₂) ⊙ X) W₃, Φ the mean over positions, expanded to all of them."""
    x, w1, w2, w3 = _fp64(x, w1, w2, w3)
    product = (x @ w1) * (x @ w2)
    pooled = product.sum(dim=0, keepdim=True) / x.shape[0]
    phi = pooled.expand(product.shape)
    return (phi * x) @ w3


def poly_nl_elementwise(
    x: Float[Tensor, "n c"],
    w1: Float[Tensor, "c c"],
    w2: Float[Tensor, "c c"],
    w3: Float[Tensor, "c v"],
) -> Float[Tensor, "n v"]:
    """Poly-NL, element by element (Eq. 7).

    y(a,b) = Σ_{d,f,h} Σ_e 1/N w₁(h,d) w₂(f,d) w₃(d,b) x(a,d) x(e,f) x(e,h).
    """
    x, w1, w2, w3 = _fp64(x, w1, w2, w3)
    return torch.einsum("hd,fd,db,ad,ef,eh->ab", w1, w2, w3, x, x, x) / x.shape[0]


def softmax_non_local(
    theta: Float[Tensor, "n k"], phi: Float[Tensor, "m k"], g: Float[Tensor, "m v"], scale: float
) -> Float[Tensor, "n v"]:
    """Non-local block, gaussian modes: y_i = Σ_j softmax_j(scale · θ_i·φ_j) g_j."""
    theta, phi, g = _fp64(theta, phi, g)
    return torch.softmax(scale * (theta @ phi.T), dim=1) @ g


def concatenation(
    theta: Float[Tensor, "n k"],
    phi: Float[Tensor, "m k"],
    g: Float[Tensor, "m v"],
    w: Float[Tensor, " two_k"],
) -> Float[Tensor, "n v"]:
    """Non-local block, concatenation mode: y_i = 1/M Σ_j ReLU(wᵀ[θ_i; φ_j]) g_j, M the number of keys."""
    theta, phi, g, w = _fp64(theta, phi, g, w)
    n, m = theta.shape[0], phi.shape[0]
    pairs = torch.cat([theta[:, None].expand(n, m, -1), phi[None].expand(n, m, -1)], dim=-1)
    return torch.relu(pairs @ w) @ g / m


def efficient(
    q: Float[Tensor, "n k"],
    k: Float[Tensor, "m k"],
    v: Float[Tensor, "m v"],
    heads: int,
    normalization: Literal["softmax", "none"],
) -> Float[Tensor, "n v"]:
    """Efficient-NL, head by head; channels are head-major, so a head is a slice of neighbouring channels.

    "softmax": Y_h = ρ_q(Q_h) ρ_k(K_h)ᵀ V_h, ρ_k the softmax over positions, ρ_q over the head's channels.
    "none": Y_h = Q_h K_hᵀ V_h / M, M the number of keys: Eq. 2 divided by it.
    Left to right, through the N×M matrix that the block exists to avoid.
    """
    if normalization not in ("softmax", "none"):
        raise ValueError(f"normalization={normalization!r}: expected 'softmax' or 'none'")
    for name, channels in (("k", k.shape[1]), ("v", v.shape[1])):
        if heads < 1 or channels % heads:
            raise ValueError(f"heads={heads}: expected a divisor of the {channels} channels of {name}")
    q, k, v = _fp64(q, k, v)
    outputs = []
    for q_h, k_h, v_h in zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True):
        if normalization == "softmax":
            outputs.append(torch.softmax(q_h, dim=1) @ torch.softmax(k_h, dim=0).T @ v_h)
        else:
            outputs.append(q_h @ k_h.T @ v_h / k.shape[0])
    return torch.cat(outputs, dim=1)


def tesa_mode(
    a: Float[Tensor, "c *spatial"],
    b: Float[Tensor, "c *spatial"],
    v: Float[Tensor, "c *spatial"],
    axis: int,
) -> Float[Tensor, "c *spatial"]:
    """One mode of TESA: fold(A Bᵀ V), each matricized: `axis` gives the rows, all others the columns."""
    a, b, v = _fp64(a, b, v)
    rows_a, rows_b, rows_v = (t.movedim(axis, 0).flatten(1) for t in (a, b, v))
    product = rows_a @ rows_b.T @ rows_v
    return product.reshape(v.movedim(axis, 0).shape).movedim(0, axis)


def ccp(
    x: Float[Tensor, "n c"], us: Sequence[Float[Tensor, "rank c"]], c: Float[Tensor, "out rank"]
) -> Float[Tensor, "n out"]:
    """Π-net polynomial in CCP form, position by position.

    For each position h of X: o = U₁h; o ← (U_i h) ⊙ o + o for i = 2…D; y = C o.
    """
    x, c, *us = _fp64(x, c, *us)
    outputs = []
    for h in x:
        o = us[0] @ h
        for u in us[1:]:
            o = (u @ h) * o + o
        outputs.append(c @ o)
    return torch.stack(outputs)


def _fp64(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]
