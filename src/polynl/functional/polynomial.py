"""Polynomials of a feature map: the general layer (Eq. 3–5), and a test for its special cases.

Dense tensors grow as (n·c)^(order + 1), so everything except :func:`ccp` is for a few positions and channels:
a block's W[3] at n = c = 3 shows its structure as well as at full size.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import permutations, product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vmap

from polynl.functional.gram import add_product, project

Element = tuple[int, int]
"""(position, channel)."""
Triplet = tuple[Element, tuple[Element, Element, Element]]
"""An output element and the three input elements whose product it contains, sorted."""

# Where W[3] has 128 MiB in fp64; taking the derivatives needs several times as much.
LARGEST_MAP = 64


def double_dot(w: Float[Tensor, "*rest n c"], x: Float[Tensor, "n c"]) -> Float[Tensor, "*rest"]:
    """The paper's bullet: (W • X)(…) = Σ_{n,c} W(…, n, c) X(n, c). Cost: one multiply-add per entry of W.

    >>> double_dot(torch.ones(5, 4, 3, 2), torch.ones(3, 2)).shape
    torch.Size([5, 4])
    """
    contracted: Tensor = torch.tensordot(w, x, dims=2)
    return contracted


def polynomial(
    x: Float[Tensor, "n c"], weights: Sequence[Float[Tensor, "..."] | None]
) -> Float[Tensor, "n c"]:
    """Polynomial of any order D with dense tensors (Eq. 3): Y = Σ_{d=1…D} W[d] • X • … • X + W[0].

    `weights` is [W[0], …, W[D]], W[d] of shape (n, c) and d more times (n, c); None stands for zero.
    Evaluated by Horner's rule, W[0] + (W[1] + (W[2] + …) • X) • X, so each order costs one contraction:
    O((nc)^(D+1)).

    >>> x = torch.tensor([[2.0]])
    >>> polynomial(x, [torch.ones(1, 1), None, torch.ones(1, 1, 1, 1, 1, 1)])
    tensor([[5.]])
    """
    if not weights:
        raise ValueError("weights is empty: expected [W0, ..., WD], at least W0 (None for zero)")
    for order, weight in enumerate(weights):
        expected = tuple(x.shape) * (order + 1)
        if weight is not None and tuple(weight.shape) != expected:
            raise ValueError(f"weights[{order}] has shape {tuple(weight.shape)}: expected {expected}")
    result: Tensor | None = None
    for weight in reversed(weights):
        if result is not None:
            result = double_dot(result, x)
        if weight is not None:
            result = weight if result is None else result + weight
    return torch.zeros_like(x) if result is None else result


def third_order(x: Float[Tensor, "n c"], w3: Float[Tensor, "n c n c n c n c"]) -> Float[Tensor, "n c"]:
    """The third-order term alone (Eq. 4): Y = ((W[3] • X) • X) • X. Cost: O((nc)⁴).

    >>> third_order(torch.tensor([[2.0]]), torch.ones((1,) * 8))
    tensor([[8.]])
    """
    return double_dot(double_dot(double_dot(w3, x), x), x)


def third_order_elementwise(
    x: Float[Tensor, "n c"], w3: Float[Tensor, "n c n c n c n c"]
) -> Float[Tensor, "n c"]:
    """The third-order term, element by element (Eq. 5).

    y(a,b) = Σ_{c,e,g} Σ_{d,f,h} w₃(a,b,c,d,e,f,g,h) x(c,d) x(e,f) x(g,h). Cost: O((nc)⁴).

    >>> third_order_elementwise(torch.tensor([[2.0]]), torch.ones((1,) * 8))
    tensor([[8.]])
    """
    return torch.einsum("abcdefgh,cd,ef,gh->ab", w3, x, x, x)


def third_order_tensor(f: Callable[[Tensor], Tensor], n: int, c: int) -> Float[Tensor, "n c n c n c n c"]:
    """W[3] of a cubic f: (n, c) → (n, c), in fp64: ∂³f / ∂x(c,d) ∂x(e,f) ∂x(g,h) / 3!.

    Many tensors give the same polynomial; this is the one that is symmetric in its three inputs. For a cubic
    f the third derivative is the same everywhere; it is taken at one random point with a fixed seed, not at
    zero, where an f that is not smooth may not have one. :func:`is_third_order` checks whether f *is* the
    contraction of this tensor.

    f receives fp64 CPU tensors under `torch.func`'s `vmap` and three levels of `grad`, so it must not branch
    in Python on their values. Cost: (nc)³ times the third gradient of f, and (nc)⁴ numbers.

    >>> third_order_tensor(lambda x: 5 * x**3, 1, 1).item()
    5.0
    """
    entries = dense_parameters(n, c, 3)
    if n * c > LARGEST_MAP:
        raise ValueError(f"n={n}, c={c}: W[3] would have {entries:.2g} entries; expected n·c ≤ {LARGEST_MAP}")
    (point,) = _random_inputs(1, n, c, seed=0)
    with torch.no_grad():
        _evaluate(f, point)
        return _third_derivative(f, point) / math.factorial(3)


def third_order_residual(f: Callable[[Tensor], Tensor], n: int, c: int) -> float:
    """How far f: (n, c) → (n, c) is from the contraction of its own W[3] (Eq. 4).

    The largest relative difference max|f(X) − Y| / max(|f(X)|, |Y|), with Y = W[3] • X • X • X, over random
    X, their negatives and scales from 1/4 to 32: lower orders show where X is small, higher ones and
    saturation where it is large, kinks under the change of sign. Rounding alone gives 1e-15, other functions
    up to 2, or infinity if they are not finite.

    >>> third_order_residual(lambda x: x + x**3, 1, 1) > 0.9
    True
    """
    w3 = third_order_tensor(f, n, c)
    worst = 0.0
    for x, scale in product(_random_inputs(4, n, c, seed=1), (1 / 4, -1 / 4, 1.0, -1.0, 32.0, -32.0)):
        with torch.no_grad():
            actual = _evaluate(f, scale * x)
        expected = third_order(scale * x, w3)
        # A NaN would lose every comparison below and pass.
        if not (actual.isfinite().all() and expected.isfinite().all()):
            return math.inf
        size = max(actual.abs().max().item(), expected.abs().max().item())
        if size > 0:
            worst = max(worst, (actual - expected).abs().max().item() / size)
    return worst


def is_third_order(f: Callable[[Tensor], Tensor], n: int, c: int, tolerance: float = 1e-9) -> bool:
    """Whether f: (n, c) → (n, c) is a special case of Eq. 4, that is, the contraction of some W[3] with X.

    False with a constant, linear (such as a residual connection) or quadratic term, with terms of order four
    and higher, and with a softmax. True for f = 0, the contraction of W[3] = 0.
    Cost: see :func:`third_order_tensor`.

    >>> is_third_order(lambda x: x @ x.T @ x, 3, 2), is_third_order(lambda x: x + x @ x.T @ x, 3, 2)
    (True, False)
    """
    return third_order_residual(f, n, c) <= tolerance


def triplets(w3: Float[Tensor, "n c n c n c n c"], tolerance: float | None = None) -> frozenset[Triplet]:
    """The triplets that W[3] uses: the terms of Eq. 5 with a non-zero weight.

    If y(a,b) has a term in x(c,d) x(e,f) x(g,h), the set contains ((a, b), ((c, d), (e, f), (g, h))), so the
    sets of two blocks can be compared. The inputs are sorted, as a product has no order, and the weights of
    all orders averaged before they are compared with zero. A weight counts as zero up to `tolerance` times
    the largest one; the default is the rounding of a sum of (nc)³ terms, as in Eq. 5.
    Cost: O((nc)⁴), and a tuple per triplet.

    >>> sorted(triplets(third_order_tensor(lambda x: x**3, 1, 2)))
    [((0, 0), ((0, 0), (0, 0), (0, 0))), ((0, 1), ((0, 1), (0, 1), (0, 1)))]
    """
    n, c = w3.shape[:2]
    if tolerance is None:
        tolerance = (n * c) ** 3 * torch.finfo(w3.dtype).eps
    # The mean over all orders of the three inputs: the same polynomial, one tensor for each.
    folded = w3.detach().reshape((n * c,) * 4)
    orders = [folded.permute(0, *order) for order in permutations((1, 2, 3))]
    size = (reduce(torch.add, orders) / len(orders)).abs()
    used = (size > tolerance * size.max()).nonzero().tolist()
    # An index of the folded (n·c) axis sorts as its (position, channel) does.
    return frozenset(
        (divmod(out, c), (divmod(i, c), divmod(j, c), divmod(k, c))) for out, i, j, k in used if i <= j <= k
    )


def dense_parameters(n: int, c: int, order: int) -> int:
    """The number of entries of W[order] in Eq. 3: (nc)^(order + 1).

    For 1024 × 196 and order 3 this is 1.6·10²¹, the paper's "nearly 10²¹". Its formula (NC)^D, here
    8·10¹⁵, counts the weights of one output element; there are NC of those.

    >>> f"{dense_parameters(1024, 196, 3):.1e}"
    '1.6e+21'
    """
    for name, value, least in (("n", n, 1), ("c", c, 1), ("order", order, 0)):
        if value < least:
            raise ValueError(f"{name}={value}: expected an integer ≥ {least}")
    return int((n * c) ** (order + 1))


def ccp(
    x: Float[Tensor, "b n c"],
    us: Sequence[Float[Tensor, "rank c"]],
    c_out: Float[Tensor, "out rank"],
    bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "b n out"]:
    """Polynomial of order D = len(us) in the factored form of Π-nets (CCP), at each position h of X.

    o = U₁h; o ← (U_i h) ⊙ o + o for i = 2…D; y = C o + bias. All orders from 1 to D are present, so it is not
    a special case of Eq. 4, and no position sees another. Cost: (D + 1)·N·C·rank multiply-adds.

    >>> ccp(torch.full((1, 1, 1), 2.0), [torch.ones(1, 1)] * 3, torch.ones(1, 1)).item()  # h(h + 1)²
    18.0
    """
    if not us:
        raise ValueError("us is empty: expected one (rank, c) matrix per order, at least one")
    o = project(x, us[0])
    for u in us[1:]:
        o = add_product(o, project(x, u), o)
    return project(o, c_out, bias)


def _evaluate(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = f(x)
    if y.shape != x.shape:
        raise ValueError(f"f returned shape {tuple(y.shape)}: expected {tuple(x.shape)}, as its input")
    if y.dtype != torch.float64:
        raise ValueError(f"f returned {y.dtype}: expected torch.float64 (a module needs .double())")
    return y


def _third_derivative(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂³f at x, shape (n, c) four times: for each output element and two inputs, the gradient of ∂²f.

    Reverse mode only, because a custom backward pass seldom has a forward mode. Three nested `jacrev` would
    be one line, but start from an identity matrix with (nc)⁶ entries.
    """

    def row(u: Tensor, v: Tensor, w: Tensor) -> Any:
        first = grad(lambda x: (f(x) * u).sum())
        second = grad(lambda x: (first(x) * v).sum())
        return grad(lambda x: (second(x) * w).sum())(x)

    size = x.numel()
    basis = torch.eye(size, dtype=x.dtype).reshape(size, *x.shape)
    index = torch.cartesian_prod(*[torch.arange(size)] * 3)
    rows = vmap(lambda i: row(*basis[i]), chunk_size=4096)(index)
    return rows.reshape(tuple(x.shape) * 4)


def _random_inputs(count: int, n: int, c: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, n, c, dtype=torch.float64, generator=generator)


# The literal reference: fp64, one sample (n, c), no code shared with the fast form. Only tests may use it.


def ccp_reference(
    x: Float[Tensor, "n c"], us: Sequence[Float[Tensor, "rank c"]], c_out: Float[Tensor, "out rank"]
) -> Float[Tensor, "n out"]:
    """Position by position: o = U₁h; o ← (U_i h) ⊙ o + o for i = 2…D; y = C o."""
    x, c_out, *us = (t.double() for t in (x, c_out, *us))
    outputs = []
    for h in x:
        o = us[0] @ h
        for u in us[1:]:
            o = (u @ h) * o + o
        outputs.append(c_out @ o)
    return torch.stack(outputs)
