"""Poly-NL (Eq. 6), as the paper writes it and through the Gram matrix: same values, different costs."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from polynl.functional.gram import (
    LARGE,
    add_product,
    channels_first,
    is_tracing,
    large_and_single,
    mix,
    outer_sum,
    products_round,
    project,
    sizes_are_open,
    symmetric_gram,
)

Form = Literal["auto", "direct", "gram"]
FORMS: tuple[Form, ...] = ("auto", "direct", "gram")
Parameters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""W₁ᵀ, W₂ᵀ, W₃ᵀ, α, β, Wᵥᵀ."""


class FormCosts(NamedTuple):
    """Costs of the two forms, relative to a multiply-add in the direct form's products."""

    product: float
    """Gram: a multiply-add over positions; G is symmetric."""
    matrix: float
    """Gram: a multiply-add between C×C matrices."""
    element: float
    """Direct: an element of its intermediate maps."""


# Fitted to measurements on two CPU cores by benchmarks/fit_forms.py; those of `poly_nl_of_one` apart.
MEASURED = FormCosts(product=1.0, matrix=1.0, element=240)
ONE_MAP = FormCosts(product=0.6, matrix=2.6, element=40)


def poly_nl(
    x: Float[Tensor, "b n c"],
    w1: Float[Tensor, "d c"],
    w2: Float[Tensor, "d c"],
    w3: Float[Tensor, "c d"],
    alpha: Float[Tensor, "*scalar"],
    beta: Float[Tensor, "*scalar"],
    w_value: Float[Tensor, "d c"] | None = None,
    form: Form = "auto",
) -> Float[Tensor, "b n c"]:
    """Z = αX + βY with Y = (Φ(XW₁ ⊙ XW₂) ⊙ XWᵥ) W₃, Eq. 6; Φ is the mean over positions, expanded.

    The matrices are held as torch's layers hold them, (out, in): `w1` is W₁ᵀ. Without `w_value`, Wᵥ is the
    identity and the layer is the paper's. Y is cubic: X → sX gives s³Y.

    * ``direct`` follows the formula: 3NC² multiply-adds.
    * ``gram`` uses that Z = X·(αI + βM(G)) with G = XᵀX/N: 2NC² + C³; for training it keeps no map but X.
    * ``auto`` takes the cheaper of the two for x's size (`preferred_form`).
    """
    if form == "auto":
        form = preferred_form(x, inner=w1.shape[0], training=x.requires_grad and torch.is_grad_enabled())
    weights = (w1, w2, w3, alpha, beta, w_value)
    if form == "gram" and _fused(x, w1):
        if needs_grad(x, *weights):
            z: Tensor = _GramForm.apply(x, *weights)
            return z
        return _gram_form(x, *weights)[0]
    in_place = not (is_tracing() or torch._C._are_functorch_transforms_active())
    if form == "direct" and in_place and not needs_grad(x, *weights):
        return _direct_in_place(x, *weights)
    pooled = poly_nl_sum(x, w1, w2, form=form) / x.shape[-2]
    return poly_nl_attend(x, pooled, w3, alpha, beta, w_value)


def poly_nl_sum(
    x: Float[Tensor, "b n c"],
    w1: Float[Tensor, "d c"],
    w2: Float[Tensor, "d c"],
    weights: Float[Tensor, "b n"] | None = None,
    form: Form = "auto",
) -> Float[Tensor, "b d"]:
    """Σⱼ mⱼ (xⱼW₁ ⊙ xⱼW₂) with the weights m of the positions, in fp32 at least.

    Directly, or as the diagonal of W₁ᵀGW₂ with G = Σⱼ mⱼ xⱼxⱼᵀ.
    """
    if form == "auto":
        form = preferred_form(x, inner=w1.shape[0], training=x.requires_grad and torch.is_grad_enabled())
    if form == "gram":
        symmetric = weights is None and not needs_grad(x)
        g = symmetric_gram(x) if symmetric else outer_sum(_weighted(x, weights), x)
        return (w2.to(g.dtype) @ g * w1.to(g.dtype)).sum(dim=-1)
    return sum_of_products(project(x, w1), project(x, w2), weights)


def sum_of_products(
    x: Float[Tensor, "b n d"], y: Float[Tensor, "b n d"], weights: Float[Tensor, "b n"] | None = None
) -> Float[Tensor, "b d"]:
    """Σⱼ mⱼ (xⱼ ⊙ yⱼ) in fp32 at least."""
    return _weighted(wide_products(x, y), weights).sum(dim=-2)


def wide_products(x: Float[Tensor, "b n d"], y: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    """X ⊙ Y in fp32 at least: in fp16 products of features overflow before their mean does."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) * y


def poly_nl_attend(
    x: Float[Tensor, "b n c"],
    pooled: Float[Tensor, "b d"],
    w3: Float[Tensor, "c d"],
    alpha: Float[Tensor, "*scalar"],
    beta: Float[Tensor, "*scalar"],
    w_value: Float[Tensor, "d c"] | None = None,
) -> Float[Tensor, "b n c"]:
    """Z = αX + β (p ⊙ XWᵥ) W₃ with the pooled products p of any map."""
    return add_product(poly_nl_branch(x, beta * pooled, w3, w_value), alpha, x)


def poly_nl_branch(
    x: Float[Tensor, "b n c"],
    pooled: Float[Tensor, "b d"],
    w3: Float[Tensor, "c d"],
    w_value: Float[Tensor, "d c"] | None = None,
) -> Float[Tensor, "b n c"]:
    """Y = (p ⊙ XWᵥ) W₃."""
    values = x if w_value is None else project(x, w_value)
    return project(values * pooled.to(x.dtype).unsqueeze(-2), w3)


def poly_nl_of_one(
    x: Float[Tensor, "c n"],
    w1: Float[Tensor, "d c"],
    w2: Float[Tensor, "d c"],
    w3: Float[Tensor, "c d"],
    alpha: Float[Tensor, "*scalar"],
    beta: Float[Tensor, "*scalar"],
    w_value: Float[Tensor, "d c"] | None = None,
    form: Form = "direct",
) -> Float[Tensor, "c n"]:
    """One map without gradients, returned in its layout; :func:`form_of_one` names the form.

    In as few calls of torch as possible: on a small map they take longer than what they compute.
    """
    c, n = x.shape
    channels_last = x.stride(1) != 1
    if form == "direct":
        products = torch.mm(w1, x).mul_(torch.mm(w2, x)).sum(dim=1)
        values = x if w_value is None else torch.mm(w_value, x)
        a, skip = w3 * (products * beta), x * alpha
        if channels_last:
            return torch.addmm(skip.mT, values.mT, a.mT, alpha=1 / n).mT
        return torch.addmm(skip, a, values, alpha=1 / n)
    g = symmetric_gram(x.mT.unsqueeze(0))[0] if c * n >= LARGE else torch.mm(x, x.mT)
    a = w3 * (torch.mm(w2, g).mul_(w1).sum(dim=1) * (beta / n))
    a = a if w_value is None else torch.mm(a, w_value)
    a.diagonal().add_(alpha)
    if channels_last:
        return torch.mm(x.mT, a.mT).mT
    return F.conv1d(x, a.unsqueeze(-1)) if c * n >= LARGE else torch.mm(a, x)


@cache
def form_of_one(dtype: torch.dtype, c: int, numbers: int, inner: int, form: Form) -> Form | None:
    """The form in which :func:`poly_nl_of_one` computes a map of so many numbers.

    None if it should not: an empty or half-precision map, or the direct form of a large one, for which
    convolutions are faster. Where products round, the Gram form should not be used either.
    """
    if numbers == 0 or dtype.itemsize == 2:
        return None
    if form == "auto":
        form = cheaper_form(numbers // c, c, inner, False, ONE_MAP)
    return None if form == "direct" and numbers >= LARGE else form


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is recording what is computed from the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _weighted(x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"] | None) -> Float[Tensor, "b n c"]:
    return x if weights is None else x * weights.unsqueeze(-1)


def _direct_in_place(
    x: Float[Tensor, "b n c"],
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    alpha: Tensor,
    beta: Tensor,
    w_value: Tensor | None,
) -> Float[Tensor, "b n c"]:
    """The direct form without gradients: its maps are not needed again, and working in place writes fewer."""
    wide = torch.promote_types(x.dtype, torch.float32)
    pooled = project(x, w1).to(wide).mul_(project(x, w2)).mean(dim=-2)
    return poly_nl_branch(x, beta * pooled, w3, w_value).addcmul_(alpha, x)


def _fused(x: Float[Tensor, "b n c"], w1: Float[Tensor, "d c"]) -> bool:
    """Whether the Gram form can be one node of the graph, with its own backward pass.

    It needs products that do not round, because αX passes through one, and first derivatives only; double
    backward is looked after by the node. `torch.func`, forward mode and compilers take the formula apart.
    """
    return (
        x.dtype == w1.dtype
        and x.dtype.itemsize > 2
        and not products_round()
        and not torch.compiler.is_compiling()
        and not is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _gram_form(
    x: Float[Tensor, "b n c"],
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    alpha: Tensor,
    beta: Tensor,
    w_value: Tensor | None,
) -> tuple[Tensor, ...]:
    """Z = X·Aᵀ with A = αI + βW₃ᵀdiag(p)Wᵥᵀ, p = diag(W₁ᵀGW₂)/N and G = XᵀX; and G, H = W₂ᵀG, p and A.

    1/N is folded into p, and every C×C product has its operands as torch's layers hold them.
    """
    g = symmetric_gram(x)
    h = _times(w2, g)
    p = (h * w1).sum(dim=-1) / x.shape[-2]
    a = w3 * (beta * p).unsqueeze(-2)
    if w_value is not None:
        a = _times(a, w_value)
    a.diagonal(dim1=-2, dim2=-1).add_(alpha)
    return mix(x, a.mT), g, h, p, a


def _times(left: Float[Tensor, "*b c d"], right: Float[Tensor, "*b d e"]) -> Float[Tensor, "b c e"]:
    """A product of small matrices, of which one may be the same for all samples."""
    samples = left.shape[0] if left.dim() == 3 else right.shape[0]
    if samples == 1:
        return torch.mm(*(m[0] if m.dim() == 3 else m for m in (left, right))).unsqueeze(0)
    return torch.bmm(left.expand(samples, -1, -1), right.expand(samples, -1, -1))


class _GramForm(torch.autograd.Function):
    """`_gram_form` as one node: it keeps X and C×C matrices, and takes three products over N to go back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        alpha: Tensor,
        beta: Tensor,
        wv: Tensor | None,
    ) -> Tensor:
        z, *matrices = _gram_form(x, w1, w2, w3, alpha, beta, wv)
        ctx.save_for_backward(x, w1, w2, w3, alpha, beta, wv, *matrices)
        # Autograd would not let a following ReLU change a view in place. Nothing else holds Z's memory.
        return torch.ops.aten._unsafe_view(z, z.shape)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            return _differentiable_backward(saved[:7], dz)
        x, w1, w2, w3, alpha, beta, wv, g, h, p, a = saved
        q = (beta * p).unsqueeze(-2)
        da = outer_sum(dz, x)
        dalpha = da.diagonal(dim1=-2, dim2=-1).sum().reshape(alpha.shape)
        dwv = None if wv is None else _times((w3 * q).mT, da).sum(dim=0)
        db = da if wv is None else _times(da, wv.mT)
        dq = (db * w3).sum(dim=-2)
        dw3 = (db * q).sum(dim=0)
        dbeta = (dq * p).sum().reshape(beta.shape)
        t = (dq * (beta / x.shape[-2])).unsqueeze(-1)
        dw1 = (h * t).sum(dim=0)
        dh = w1 * t
        dw2 = _times(dh, g).sum(dim=0)
        dx = _gram_form_dx(x, dz, a, _times(w2.mT, dh)) if ctx.needs_input_grad[0] else None
        return dx, dw1, dw2, dw3, dalpha, dbeta, dwv


def _gram_form_dx(x: Tensor, dz: Tensor, a: Tensor, dg: Tensor) -> Tensor:
    """dX = dZ·A + X·S with S = dG + dGᵀ, the second product added to the first in place."""
    dx, s = mix(dz, a), dg + dg.mT
    if channels_first(dx) and large_and_single(x, least=2 * LARGE):
        return dx.add_(mix(x, s))  # by a convolution, faster by more than one pass over the map
    return dx.mT.baddbmm_(s, x.mT).mT if channels_first(dx) else dx.baddbmm_(x, s)


def _differentiable_backward(inputs: Sequence[Any], dz: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the formula by autograd, which can differentiate them once more."""
    x, w1, w2, w3, alpha, beta, wv = inputs
    z = poly_nl_attend(x, poly_nl_sum(x, w1, w2, form="gram") / x.shape[-2], w3, alpha, beta, wv)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


def preferred_form(
    x: Float[Tensor, "b n c"], inner: int, training: bool, costs: FormCosts | None = None
) -> Form:
    """The form that should be faster for a map like x and the inner width D: see :func:`cheaper_form`.

    On CPUs the direct form is faster in half precision, because the Gram form has to compute in fp32. In an
    exported program, which is for maps of all sizes, it is never far from the best.
    """
    if sizes_are_open() or (x.dtype.itemsize == 2 and x.device.type == "cpu"):
        return "direct"
    n, c = x.shape[-2:]
    return cheaper_form(n, c, inner, training, MEASURED if costs is None else costs)


def cheaper_form(n: int, c: int, inner: int, training: bool, costs: FormCosts = MEASURED) -> Form:
    """The form with the lower cost for N positions, C channels and the inner width D.

    Counts the multiply-adds of a sample over positions and between C×C matrices; for D = C:

    |        | inference | training   |
    |--------|-----------|------------|
    | direct | 3NC²      | 9NC²       |
    | gram   | 2NC² + C³ | 5NC² + 3C³ |

    weighted by `costs`, which are measured on CPUs but also used for other devices; there, for large maps,
    little but the counts matters. The layout affects both forms alike and is ignored.
    """
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
