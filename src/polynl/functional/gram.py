"""The products over positions that all blocks consist of.

A feature map is a matrix X of N positions × C channels, in a batch (b, n, c). It is a view of either a
channels-first map (b, c, n), transposed, or a channels-last map. Every product returns the layout of its
input, so no block copies a map to change its layout.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# What follows was measured on CPUs, where single maps of this many numbers and more are not held by caches:
# a 1×1 convolution multiplies them by a matrix faster than a matrix product, by up to three quarters;
LARGE = 2**19
# and sums over their positions are faster in pieces, as a batch, which is added up: by a tenth to a quarter.
PIECES = 8
# Channels from which on the products of single maps are large enough as they are, and a Gram matrix is faster
# in parts, since those below the diagonal need no product.
SPLIT = 256


def channels_first(x: Float[Tensor, "b n c"]) -> bool:
    """Whether x is the transposed view of a (b, c, n) tensor."""
    return x.stride(-1) != 1


def gram(x: Float[Tensor, "b n c"], y: Float[Tensor, "b n d"] | None = None) -> Float[Tensor, "b c d"]:
    """The Gram matrix G = XᵀX / N, or XᵀY / N of two maps: n·c·d multiply-adds.

    Half precision is accumulated in fp32, because a sum of N squares soon overflows fp16.

    >>> gram(torch.ones(1, 4, 2))
    tensor([[[1., 1.],
             [1., 1.]]])
    """
    return outer_sum(x, x if y is None else y) / x.shape[-2]


def outer_sum(x: Float[Tensor, "b n c"], y: Float[Tensor, "b n d"]) -> Float[Tensor, "b c d"]:
    """XᵀY = Σⱼ xⱼyⱼᵀ in fp32 at least: n·c·d multiply-adds."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    x, y = x.to(dtype), y.to(dtype)
    if large_and_single(x) and x.shape[2] < SPLIT and x.shape[1] % PIECES == 0:
        x, y = (t[0].unflatten(0, (PIECES, -1)) for t in (x, y))
        return torch.bmm(x.transpose(-2, -1), y).sum(dim=0, keepdim=True)
    return torch.bmm(x.transpose(-2, -1), y)


def mix(x: Float[Tensor, "b n c"], m: Float[Tensor, "b c d"]) -> Float[Tensor, "b n d"]:
    """X M with a matrix per sample, in the wider of the two dtypes, returned in X's: n·c·d multiply-adds."""
    wide, m = (x, m) if x.dtype == m.dtype else _promoted(x, m)
    if not channels_first(x):
        y = torch.bmm(wide, m)
    elif large_and_single(x):
        y = F.conv1d(wide.transpose(-2, -1), m[0].transpose(-2, -1).unsqueeze(-1)).transpose(-2, -1)
    else:
        y = torch.bmm(m.transpose(-2, -1), wide.transpose(-2, -1)).transpose(-2, -1)
    return y.to(x.dtype)


def _promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the widest dtype of all."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    return tuple(t.to(dtype) for t in tensors)


def mix_by_gram(
    x: Float[Tensor, "b n c"], mixing: Callable[[Float[Tensor, "b c c"]], Float[Tensor, "b c c"]]
) -> Float[Tensor, "b n c"]:
    """Z = X + X·mixing(G) with G = XᵀX / N: the dot-product blocks, with their own `mixing`.

    One product with I + M gives Z. The backward pass keeps only X and C×C matrices and takes three products
    over N: dM = XᵀdZ, and dX = dZMᵀ + XS with one symmetric matrix S = (dG + dGᵀ)/N. Autograd alone would
    take four, and one more N×C tensor to sum them. The forward pass takes less than two: G is symmetric.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        g = symmetric_gram(x) / x.shape[-2]
    elif torch.compiler.is_compiling():
        g, x = _GramAndMap.apply(x)  # compilers reject a function with a forward mode
    else:
        g, x = _GramAndMapBothModes.apply(x)
    m = mixing(g)
    if products_round():
        return x + mix(x, m)
    return mix(x, m + torch.eye(x.shape[-1], dtype=g.dtype, device=x.device))


def project(
    x: Float[Tensor, "b n c"], w: Float[Tensor, "d c"], bias: Float[Tensor, " d"] | None = None
) -> Float[Tensor, "b n d"]:
    """X Wᵀ + bias with one matrix for the whole batch, held as torch's layers hold it: (out, in).

    A batched matrix product would also work, but its backward pass holds a gradient of W per sample.
    """
    if channels_first(x) and x.shape[-2] > 0:  # torch's convolutions refuse maps without positions
        return F.conv1d(x.transpose(-2, -1), w.unsqueeze(-1), bias).transpose(-2, -1)
    return F.linear(x, w, bias)


def add_product(y: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """Y + A ⊙ X; in one pass over the maps, except in exported programs: Core ML has no such operation."""
    return y + a * x if sizes_are_open() else torch.addcmul(y, a, x)


def large_and_single(x: Float[Tensor, "b n c"], least: int = LARGE) -> bool:
    """Whether x is one map of at least that many numbers, on a CPU."""
    if sizes_are_open() or x.device.type != "cpu":
        return False
    b, n, c = x.shape
    return b == 1 and n * c >= least


def products_round() -> bool:
    """Whether products may round their operands, to TF32 or bfloat16: then αX must not pass through one."""
    return torch.get_float32_matmul_precision() != "highest"


# Does what torch.compiler.assume_constant_result does, without importing the compiler, which takes as long as
# importing torch.
products_round._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sizes_are_open() -> bool:
    """Whether code must not branch on sizes, because an exported or traced program is for all of them."""
    return torch.compiler.is_exporting() or is_tracing()


def is_tracing() -> bool:
    """Whether torch.jit.trace is recording: then nothing may depend on strides or on gradients."""
    return torch.jit.is_tracing()  # type: ignore[attr-defined]


class _GramAndMap(torch.autograd.Function):
    """X ↦ (G, X): passing X through lets one backward pass sum both of its gradients in one tensor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return symmetric_gram(x) / x.shape[-2], x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dg: Tensor, dx: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = (dg + dg.transpose(-2, -1)) / x.shape[-2]
        if torch.is_grad_enabled() or x.dtype != s.dtype:
            return dx + mix(x, s)
        # dx comes from the only use of X in mix_by_gram and has no other holder, so it can be overwritten.
        return (
            dx.transpose(-2, -1).baddbmm_(s, x.transpose(-2, -1)).transpose(-2, -1)
            if channels_first(x)
            else dx.baddbmm_(x, s)
        )


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
        return half + half.transpose(-2, -1), dx.view_as(dx)


def symmetric_gram(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b c c"]:
    """XᵀX, not divided by N, in fp32 at least; for large maps from fewer products, since it is symmetric."""
    n, c = x.shape[-2:]
    if sizes_are_open() or c < SPLIT or n < c:
        return outer_sum(x, x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    g = wide.new_empty(x.shape[0], c, c)
    _fill_symmetric(g, wide, 0, c, levels=1 if x.shape[0] == 1 and c < 2 * SPLIT else 2)
    return g


def _fill_symmetric(g: Tensor, x: Tensor, start: int, stop: int, levels: int) -> None:
    """A diagonal block of G: its upper right quarter, copied to the lower left, and two diagonal blocks.

    One level takes 3/4 of the multiply-adds, two take 5/8; narrower products are slower again.
    """
    if levels == 0:
        g[:, start:stop, start:stop] = torch.bmm(x[..., start:stop].transpose(-2, -1), x[..., start:stop])
        return
    middle = (start + stop) // 2
    upper = torch.bmm(x[..., start:middle].transpose(-2, -1), x[..., middle:stop])
    g[:, start:middle, middle:stop] = upper
    g[:, middle:stop, start:middle] = upper.transpose(-2, -1)
    _fill_symmetric(g, x, start, middle, levels - 1)
    _fill_symmetric(g, x, middle, stop, levels - 1)
