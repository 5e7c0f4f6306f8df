"""TESA (Babiloni 2020), a reconstruction: self-attention along every mode of the feature tensor."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

Order = Literal["cheap", "quadratic"]
Normalization = Literal["mean", "none"]


def tesa_mode(
    a: Float[Tensor, "b c *spatial"],
    b: Float[Tensor, "b c *spatial"],
    v: Float[Tensor, "b c *spatial"],
    axis: int,
    order: Order = "cheap",
    normalization: Normalization = "none",
) -> Float[Tensor, "b c *spatial"]:
    """fold(A₍r₎ B₍r₎ᵀ V₍r₎), where T₍r₎ (R×S) is T with `axis` as rows and all other axes as columns.

    * ``cheap``: (ABᵀ)V through an R×R matrix, 2R²S multiply-adds.
    * ``quadratic``: A(BᵀV) through an S×S matrix, 2RS²: the cost that the Poly-NL paper reports.

    `normalization` "mean" divides by the number of columns S.

    With A = B = V = X and the channel axis this is X·(XᵀX) of the folded map: N times the Gram matrix mixes.
    """
    rows_first = v.movedim(axis, 1)
    a, b, flat = (t.movedim(axis, 1).flatten(2) for t in (a, b, v))
    if normalization == "mean":
        a = a / a.shape[-1]
    y = (a @ b.transpose(-2, -1)) @ flat if order == "cheap" else a @ (b.transpose(-2, -1) @ flat)
    return y.reshape(rows_first.shape).movedim(1, axis)


# The literal reference: fp64, one sample (n, c), no code shared with the fast form. Only tests may use it.


def tesa_mode_reference(
    a: Float[Tensor, "c *spatial"],
    b: Float[Tensor, "c *spatial"],
    v: Float[Tensor, "c *spatial"],
    axis: int,
) -> Float[Tensor, "c *spatial"]:
    """fold(A Bᵀ V), each matricized: `axis` gives the rows, all others the columns."""
    a, b, v = (t.double() for t in (a, b, v))
    rows_a, rows_b, rows_v = (t.movedim(axis, 0).flatten(1) for t in (a, b, v))
    product = rows_a @ rows_b.T @ rows_v
    return product.reshape(v.movedim(axis, 0).shape).movedim(0, axis)
