"""The products over positions that every block is made of.

A feature map is a matrix X of N positions × C channels, in a batch: (b, n, c). In memory it is one of two
things, and both arrive here as views: channels-first maps (b, c, n), transposed, and channels-last maps.
Every product returns the layout it was given, so that no block ever copies a map to turn it around.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def channels_first(x: Float[Tensor, "*b n c"]) -> bool:
    """Whether x is the transposed view of a (b, c, n) tensor."""
    return x.stride(-1) != 1


def gram(x: Float[Tensor, "*b n c"], y: Float[Tensor, "*b n d"] | None = None) -> Float[Tensor, "*b c d"]:
    """The Gram matrix G = XᵀX / N, or XᵀY / N of two maps, in fp32 at least: n·c·d multiply-adds.

    Half precision is accumulated in fp32, since a sum over N squares leaves the range of fp16 early.

    >>> gram(torch.ones(1, 4, 2))
    tensor([[[1., 1.],
             [1., 1.]]])
    """
    y = x if y is None else y
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype).mT @ y.to(dtype) / x.shape[-2]


def mix(x: Float[Tensor, "*b n c"], m: Float[Tensor, "*b c d"]) -> Float[Tensor, "*b n d"]:
    """X M with a matrix per sample, in the wider of the two dtypes, returned in X's: n·c·d multiply-adds."""
    dtype = torch.promote_types(x.dtype, m.dtype)
    wide, m = x.to(dtype), m.to(dtype)
    y = (m.mT @ wide.mT).mT if channels_first(x) else wide @ m
    return y.to(x.dtype)


def project(
    x: Float[Tensor, "b n c"], w: Float[Tensor, "c d"], bias: Float[Tensor, " d"] | None = None
) -> Float[Tensor, "b n d"]:
    """X W + bias with one matrix for the whole batch, that is a 1×1 convolution with weight Wᵀ.

    A product of batched matrices would do, but its backward pass holds a gradient of W per sample.
    """
    if channels_first(x):
        return F.conv1d(x.mT, w.mT.unsqueeze(-1), bias).mT
    return F.linear(x, w.mT, bias)
