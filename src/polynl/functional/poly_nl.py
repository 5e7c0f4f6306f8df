"""Poly-NL (Eq. 6), as the paper writes it and through the Gram matrix: same values, different costs."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.functional.gram import mix_by_gram, project, sizes_are_open

Form = Literal["auto", "direct", "gram"]
FORMS: tuple[Form, ...] = ("auto", "direct", "gram")


class FormCosts(NamedTuple):
    """Costs of the two forms, relative to a multiply-add in the direct form's products."""

    product: float
    """Gram: a multiply-add over positions; G is symmetric."""
    matrix: float
    """Gram: a multiply-add between C×C matrices."""
    element: float
    """Direct: an element of its intermediate maps."""


# Fitted to measurements on two CPU cores by benchmarks/fit_forms.py.
MEASURED = FormCosts(product=0.9, matrix=1.2, element=40)


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
    * ``gram`` uses that Z = X·(αI + βM(G)) with G = XᵀX/N: 2NC² + C³; for training it keeps no map but X.
    * ``auto`` takes the cheaper of the two for x's size (`preferred_form`).
    """
    if form == "auto":
        form = preferred_form(x, inner=w1.shape[-1], training=x.requires_grad and torch.is_grad_enabled())
    if form == "gram":
        return mix_by_gram(x, lambda g: poly_nl_mixing(g, w1, w2, w3, w_value), alpha, beta)
    left, right = project(x, w1), project(x, w2)
    # Without gradients the two maps are not needed again; working in place writes two fewer.
    keep = torch.is_grad_enabled()
    pooled = (left * right if keep else left.mul_(right)).mean(dim=-2, keepdim=True)
    y = project((x if w_value is None else project(x, w_value)) * (beta * pooled), w3)
    return torch.addcmul(y, alpha, x) if keep else y.addcmul_(alpha, x)


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


def preferred_form(
    x: Float[Tensor, "b n c"], inner: int, training: bool, costs: FormCosts = MEASURED
) -> Form:
    """The form that should be faster for a map like x and the inner width D.

    Counts the multiply-adds of a sample over positions and between C×C matrices; for D = C:

    |        | inference | training   |
    |--------|-----------|------------|
    | direct | 3NC²      | 9NC²       |
    | gram   | 2NC² + C³ | 5NC² + 3C³ |

    weighted by `costs`, which are measured on CPUs but also used for other devices; there, for large maps,
    little but the counts matters. Layout and dtype affect both forms alike and are ignored.
    """
    if sizes_are_open():
        return "direct"  # never far from the best, unlike the Gram form on small maps
    n, c = x.shape[-2:]
    reduced = inner != c
    over_positions, among_matrices, passes = (5, 3, 3) if training else (2, 1, 1)
    direct = passes * n * inner * ((3 + reduced) * c + costs.element)
    products = costs.product * over_positions * n * c * c
    matrices = costs.matrix * among_matrices * (1 + reduced) * c * c * inner
    return "gram" if products + matrices < direct else "direct"


# The literal references: fp64, one sample (n, c), no code shared with the fast form. Only tests may use them.


def poly_nl_reference(
    x: Float[Tensor, "n c"],
    w1: Float[Tensor, "c d"],
    w2: Float[Tensor, "c d"],
    w3: Float[Tensor, "d v"],
    w_value: Float[Tensor, "c d"] | None = None,
) -> Float[Tensor, "n v"]:
    """Y of Eq. 6: (Φ(X W₁ ⊙ X W₂) ⊙ X) W₃, or with X Wᵥ for the second X; Φ is the mean over positions."""
    x, w1, w2, w3 = (t.double() for t in (x, w1, w2, w3))
    product = (x @ w1) * (x @ w2)
    pooled = product.sum(dim=0, keepdim=True) / x.shape[0]
    phi = pooled.expand(product.shape)
    values = x if w_value is None else x @ w_value.double()
    return (phi * values) @ w3


def poly_nl_elementwise_reference(
    x: Float[Tensor, "n c"],
    w1: Float[Tensor, "c c"],
    w2: Float[Tensor, "c c"],
    w3: Float[Tensor, "c v"],
) -> Float[Tensor, "n v"]:
    """Eq. 6 element by element, Eq. 7.

    y(a,b) = Σ_{d,f,h} Σ_e 1/N w₁(h,d) w₂(f,d) w₃(d,b) x(a,d) x(e,f) x(e,h).
    """
    x, w1, w2, w3 = (t.double() for t in (x, w1, w2, w3))
    return torch.einsum("hd,fd,db,ad,ef,eh->ab", w1, w2, w3, x, x, x) / x.shape[0]
