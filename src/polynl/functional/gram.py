"""The products over positions that all blocks consist of.

A feature map is a matrix X of N positions × C channels, in a batch (b, n, c). It is a view of either a
channels-first map (b, c, n), transposed, or a channels-last map. Every product returns the layout of its
input, so no block copies a map to change its layout.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def channels_first(x: Float[Tensor, "b n c"]) -> bool:
    """Whether x is the transposed view of a (b, c, n) tensor."""
    return x.stride(-1) != 1


def gram(x: Float[Tensor, "b n c"], y: Float[Tensor, "b n d"] | None = None) -> Float[Tensor, "b c d"]:
    """The Gram matrix G = XᵀX / N, or XᵀY / N of two maps, in fp32 at least: n·c·d multiply-adds.

    Half precision is accumulated in fp32, because a sum of N squares soon overflows fp16.

    >>> gram(torch.ones(1, 4, 2))
    tensor([[[1., 1.],
             [1., 1.]]])
    """
    y = x if y is None else y
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return torch.bmm(x.to(dtype).mT, y.to(dtype)) / x.shape[-2]


def mix(x: Float[Tensor, "b n c"], m: Float[Tensor, "b c d"]) -> Float[Tensor, "b n d"]:
    """X M with a matrix per sample, in the wider of the two dtypes, returned in X's: n·c·d multiply-adds."""
    dtype = torch.promote_types(x.dtype, m.dtype)
    wide, m = x.to(dtype), m.to(dtype)
    y = torch.bmm(m.mT, wide.mT).mT if channels_first(x) else torch.bmm(wide, m)
    return y.to(x.dtype)


def mix_by_gram(
    x: Float[Tensor, "b n c"],
    mixing: Callable[[Float[Tensor, "b c c"]], Float[Tensor, "b c c"]],
    alpha: Float[Tensor, ""] | float = 1.0,
    beta: Float[Tensor, ""] | float = 1.0,
) -> Float[Tensor, "b n c"]:
    """Z = αX + βX·mixing(G) with G = XᵀX / N: every dot-product block, with its own `mixing`.

    One product with αI + βM gives Z. The backward pass keeps only X and C×C matrices and takes three products
    over N: dM = XᵀdZ, and dX = dZMᵀ + XS with one symmetric matrix S = (dG + dGᵀ)/N. Autograd alone would
    take four, and one more N×C tensor to sum them. The forward pass takes less than two: G is symmetric.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        g = _symmetric_gram(x)
    elif torch.compiler.is_compiling():
        g, x = _GramAndMap.apply(x)  # compilers reject a function with a forward mode
    else:
        g, x = _GramAndMapBothModes.apply(x)
    if _products_round():
        return alpha * x + beta * mix(x, mixing(g))
    eye = torch.eye(x.shape[-1], dtype=g.dtype, device=x.device)
    return mix(x, alpha * eye + beta * mixing(g))


def project(
    x: Float[Tensor, "b n c"], w: Float[Tensor, "c d"], bias: Float[Tensor, " d"] | None = None
) -> Float[Tensor, "b n d"]:
    """X W + bias with one matrix for the whole batch: a 1×1 convolution with weight Wᵀ.

    A batched matrix product would also work, but its backward pass holds a gradient of W per sample.
    """
    if channels_first(x):
        return F.conv1d(x.mT, w.mT.unsqueeze(-1), bias).mT
    return F.linear(x, w.mT, bias)


def _products_round() -> bool:
    """Whether products may round their operands, to TF32 or bfloat16: then αX must not pass through one."""
    return torch.get_float32_matmul_precision() != "highest"


# Does what torch.compiler.assume_constant_result does, without importing the compiler, which takes as long as
# importing torch.
_products_round._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sizes_are_open() -> bool:
    """Whether code must not branch on sizes, because an exported program is for all of them."""
    return torch.compiler.is_exporting()


class _GramAndMap(torch.autograd.Function):
    """X ↦ (G, X): passing X through lets one backward pass sum both of its gradients in one tensor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return _symmetric_gram(x), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dg: Tensor, dx: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = (dg + dg.mT) / x.shape[-2]
        if torch.is_grad_enabled() or x.dtype != s.dtype:
            return dx + mix(x, s)
        # dx comes from the only use of X in mix_by_gram and has no other holder, so it can be overwritten.
        return dx.mT.baddbmm_(s, x.mT).mT if channels_first(x) else dx.baddbmm_(x, s)


class _GramAndMapBothModes(_GramAndMap):
    """The same, differentiable in forward mode too."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        half = gram(dx, x)
        return half + half.mT, dx.view_as(dx)


def _symmetric_gram(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b c c"]:
    """`gram(x)`; for large maps from the blocks on and above the diagonal: 5/8 of the multiply-adds."""
    n, c = x.shape[-2:]
    if sizes_are_open() or c < 256 or n < c:
        return gram(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    g = wide.new_empty(x.shape[0], c, c)
    for start in range(0, c, -(-c // 4)):
        stop = min(start + -(-c // 4), c)
        upper = torch.bmm(wide[..., start:stop].mT, wide[..., start:]).div_(n)
        g[:, start:stop, start:] = upper
        g[:, stop:, start:stop] = upper[..., stop - start :].mT
    return g
