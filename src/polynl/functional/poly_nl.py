"""Poly-NL (Eq. 6), as the paper writes it and through the Gram matrix: the same values, other costs."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.gram import gram, mix, project

Form = Literal["auto", "direct", "gram"]
FORMS: tuple[Form, ...] = ("auto", "direct", "gram")


def poly_nl(
    x: Float[Tensor, "b n c"],
    w1: Float[Tensor, "c d"],
    w2: Float[Tensor, "c d"],
    w3: Float[Tensor, "d c"],
    alpha: Float[Tensor, ""],
    beta: Float[Tensor, ""],
    w_value: Float[Tensor, "c d"] | None = None,
    form: Form = "auto",
) -> Float[Tensor, "b n c"]:
    """Z = αX + βY with Y = (Φ(XW₁ ⊙ XW₂) ⊙ XWᵥ) W₃, Eq. 6; Φ is the mean over positions, expanded.

    Without `w_value`, Wᵥ is the identity and the layer is the paper's. Y is cubic: X → sX gives s³Y.

    * ``direct`` follows the formula: 3NC² multiply-adds.
    * ``gram`` uses that Y = X·M(G) with G = XᵀX/N: 2NC² + C³, and no N×C intermediate.
    * ``auto`` takes the cheaper of the two for x's size (`preferred_form`).
    """
    if form == "auto":
        form = preferred_form(n=x.shape[-2], c=x.shape[-1], d=w1.shape[-1])
    if form == "gram":
        y = mix(x, poly_nl_mixing(gram(x), w1, w2, w3, w_value))
    else:
        pooled = (project(x, w1) * project(x, w2)).mean(dim=-2, keepdim=True, dtype=_at_least_fp32(x))
        value = x if w_value is None else project(x, w_value)
        y = project(value * pooled.to(x.dtype), w3)
    return alpha * x + beta * y


def poly_nl_mixing(
    gram: Float[Tensor, "b c c"],
    w1: Float[Tensor, "c d"],
    w2: Float[Tensor, "c d"],
    w3: Float[Tensor, "d c"],
    w_value: Float[Tensor, "c d"] | None = None,
) -> Float[Tensor, "b c c"]:
    """M(G) = Wᵥ diag(p) W₃ with p_d = (W₁ᵀ G W₂)_dd, so that Y = X·M(G). Linear in G."""
    dtype = torch.promote_types(gram.dtype, w1.dtype)
    w1, w2, w3 = w1.to(dtype), w2.to(dtype), w3.to(dtype)
    pooled = ((gram.to(dtype) @ w2) * w1).sum(dim=-2)
    scaled = pooled.unsqueeze(-1) * w3
    return scaled if w_value is None else w_value.to(dtype) @ scaled


def preferred_form(n: int, c: int, d: int) -> Form:
    """The form with fewer multiply-adds for N positions, C channels and inner width D, per sample.

    direct: XW₁, XW₂, the product with W₃, and XWᵥ where D ≠ C.
    gram: G, the product with M, GW₂, and Wᵥ·(diag(p)W₃) where D ≠ C.
    """
    reduced = d != c
    direct = n * c * d * (3 + reduced)
    through_gram = 2 * n * c * c + c * c * d * (1 + reduced)
    return "gram" if through_gram < direct else "direct"


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
