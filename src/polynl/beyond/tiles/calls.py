"""Calls in a network whose result at a position depends on the whole map, or on its size.

`Calls` finds them while the network runs and hands them over. Each knows how to work in tiles: a summary of
the tile's own positions, which adds up over tiles, and what the summary of the whole map makes of a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polynl.beyond.tiles.resampling import Resampling
from polynl.blocks.base import Block, LocalBlock
from polynl.functional.summary import Summary


@dataclass(frozen=True)
class Axis:
    """One of the two axes of a tile's map: where the tile lies in the map of the whole image."""

    dim: int
    start: int
    """Of the tile with its halo."""
    core: tuple[int, int]
    """Start and stop of the tile without its halo."""
    size: int
    """Of the whole map."""

    def up_to_multiple(self, unit: int) -> Axis:
        """Without the rest of the whole map that does not fill a window of `unit` positions."""
        low, high = (min(edge, self.size // unit * unit) for edge in self.core)
        return replace(self, core=(low, high))

    def cropped(self, x: Tensor) -> Tensor:
        """The tile without its halo."""
        start, stop = self.core
        return x.narrow(self.dim, start - self.start, stop - start)


def core_of(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The tile without its halo on both axes."""
    for axis in axes:
        x = axis.cropped(x)
    return x


@dataclass(frozen=True)
class Call(ABC):
    """A call and its input."""

    x: Tensor
    reduces: ClassVar[bool] = True
    """Whether it needs a sum over all positions, and so a pass over all tiles."""

    @abstractmethod
    def neutral(self) -> Tensor:
        """A result of the right shape in which no position has seen another."""

    def summary(self, axes: Sequence[Axis]) -> Any:
        """What adds up to the whole map's, from the core of a tile."""
        raise TypeError(f"{type(self).__name__} has no summary")

    def unit(self, axis: int) -> int:
        """Tiles have to begin at multiples of this in the call's map."""
        return 1

    def why_not_in_tiles(self) -> str | None:
        """What keeps it from giving the same on tiles as on the whole map."""
        return None

    @abstractmethod
    def apply(self, summary: Any, axes: Sequence[Axis]) -> Tensor:
        """The result for a tile, given the sum of the summaries."""


@dataclass(frozen=True)
class Pooling(Call):
    """A mean over positions, or over those of every bin of a fixed number of bins."""

    dims: tuple[int, ...]
    bins: tuple[int, ...]
    keepdim: bool

    def neutral(self) -> Tensor:
        """Zeros."""
        return self._shaped(self.x.new_zeros(self._pooled_shape()))

    def summary(self, axes: Sequence[Axis]) -> Tensor:
        """The share of the tile in every bin's mean, in double precision."""
        part = core_of(self.x, axes)
        for axis in axes:
            weights = _bin_weights(axis, self.bins[self.dims.index(axis.dim)])
            part = torch.tensordot(part, weights.to(part), dims=([axis.dim], [1])).movedim(-1, axis.dim)
        others = [dim for dim in self.dims if dim not in [axis.dim for axis in axes]]
        return (part.mean(others, keepdim=True) if others else part).to("cpu", torch.float64)

    def apply(self, summary: Tensor, axes: Sequence[Axis]) -> Tensor:
        """The means."""
        return self._shaped(summary.to(self.x.device, self.x.dtype))

    def _pooled_shape(self) -> list[int]:
        shape = list(self.x.shape)
        for dim, bins in zip(self.dims, self.bins, strict=True):
            shape[dim] = bins
        return shape

    def _shaped(self, pooled: Tensor) -> Tensor:
        return (
            pooled
            if self.keepdim
            else pooled.flatten().reshape(
                [size for dim, size in enumerate(self._pooled_shape()) if dim not in self.dims]
            )
        )


def _bin_weights(axis: Axis, bins: int) -> Tensor:
    """(bins, positions of the core): 1 ÷ size of the bin, as in adaptive_avg_pool2d."""
    position = torch.arange(*axis.core, dtype=torch.float64)
    number = torch.arange(bins, dtype=torch.float64)[:, None]
    first, last = (number * axis.size / bins).floor(), ((number + 1) * axis.size / bins).ceil()
    return ((first <= position) & (position < last)) / (last - first)


@dataclass(frozen=True)
class Normalization(Call):
    """A group norm; an instance norm is one with a group for every channel."""

    groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def neutral(self) -> Tensor:
        """Every position normalised by itself, so that values stay in a range."""
        groups = self.x.unflatten(1, (self.groups, -1))
        return (groups * groups.square().mean(2, keepdim=True).add(self.eps).rsqrt()).flatten(1, 2)

    def summary(self, axes: Sequence[Axis]) -> Moments:
        """Count, mean and spread of the core."""
        part = core_of(self.x, axes).unflatten(1, (self.groups, -1)).flatten(2).double()
        if part.shape[2] == 0:
            return Moments(0, *(part.new_zeros(part.shape[:2], device="cpu") for _ in range(2)))
        variance, mean = torch.var_mean(part, dim=2, correction=0)
        return Moments(part.shape[2], mean.cpu(), variance.cpu() * part.shape[2])

    def apply(self, summary: Moments, axes: Sequence[Axis]) -> Tensor:
        """The map, normalised by the mean and the variance of all tiles."""
        channels = self.x.shape[1] // self.groups
        mean, variance = (
            moment.repeat_interleave(channels, dim=1).to(self.x)
            for moment in (summary.mean, summary.squares / summary.count)
        )
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        offset = -mean * scale if self.bias is None else self.bias - mean * scale
        shape = [*scale.shape, *[1] * (self.x.dim() - 2)]
        return torch.addcmul(offset.view(shape), self.x, scale.view(shape))


@dataclass(frozen=True)
class Moments:
    """Count, mean (b, groups) and sum of squared differences from it; `+` merges those of two parts."""

    count: int
    mean: Tensor
    squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.count / max(count, 1))
        between = difference.square() * (self.count * other.count / max(count, 1))
        return Moments(count, mean, self.squares + other.squares + between)


@dataclass(frozen=True)
class Attention(Call):
    """A block of polynl."""

    block: Block

    def unit(self, axis: int) -> int:
        """The size of the windows from which a Non-local block takes its keys."""
        size = getattr(self.block, "pool_size", 1) if getattr(self.block, "sub_sample", None) else 1
        return size if isinstance(size, int) else size[axis]

    def why_not_in_tiles(self) -> str | None:
        """The block's own reason."""
        return self.block.why_not_in_parts()

    def neutral(self) -> Tensor:
        """The map without what the block adds."""
        return self.x.clone()

    def summary(self, axes: Sequence[Axis]) -> Summary:
        """The block's own."""
        windows = [axis.up_to_multiple(self.unit(number)) for number, axis in enumerate(axes)]
        return self.block.summarize(core_of(self.x, windows))

    def apply(self, summary: Summary, axes: Sequence[Axis]) -> Tensor:
        """Each position of the tile attends to the whole map."""
        return self.block.attend(self.x, summary)


@dataclass(frozen=True)
class Resampled(Call):
    """An interpolation to a size: where the samples lie depends on the size of the whole map."""

    resampling: Resampling
    size: tuple[int, int]
    reduces: ClassVar[bool] = False

    def why_not_in_tiles(self) -> str | None:
        """A mode of interpolation that is not supported."""
        return self.resampling.why_not_in_tiles()

    def neutral(self) -> Tensor:
        """As on a whole map."""
        return self.resampling.of_whole(self.x, self.size)

    def apply(self, summary: Any, axes: Sequence[Axis]) -> Tensor:
        """The samples of the tile; `axes` are those of the input, and then those of the output."""
        return self.resampling.of_tile(self.x, self.size, axes[:2], axes[2:])


Handle = Callable[[Call, Callable[[], Any]], Any]


class Calls(TorchFunctionMode):
    """While entered, hands calls to `handle`, with a function that makes the call as it is."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle, self._handling = handle, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        kwargs = kwargs or {}
        recognize = RECOGNIZED.get(func)
        call = None if recognize is None or self._handling else recognize(*args, **kwargs)
        return func(*args, **kwargs) if call is None else self.hand_over(call, lambda: func(*args, **kwargs))

    def hand_over(self, call: Call, as_it_is: Callable[[], Any]) -> Any:
        """The result of a call; calls within it are its own business."""
        self._handling = True
        try:
            return self._handle(call, as_it_is)
        finally:
            self._handling = False


@contextmanager
def calls(model: nn.Module, handle: Handle) -> Iterator[None]:
    """While entered, the model's calls go to `handle`."""
    mode = Calls(handle)
    blocks = [m for m in model.modules() if isinstance(m, Block) and not isinstance(m, LocalBlock)]
    taken = [block for block in blocks if "forward" in vars(block)]
    if taken:
        raise ValueError(f"a {type(taken[0]).__name__} has a forward of its own, which tiles would replace")
    for block in blocks:
        block.forward = _handed_over(block, mode)  # type: ignore[method-assign]
    try:
        with mode:
            yield
    finally:
        for block in blocks:
            del block.forward


def _handed_over(block: Block, mode: Calls) -> Callable[..., Tensor]:
    def forward(x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if mask is not None or context is not None:
            raise ValueError(f"a {type(block).__name__} gets a mask or a context, which tiles do not support")
        return mode.hand_over(Attention(x, block), lambda: type(block).forward(block, x))

    return forward


# How a function's arguments make a call; None for uses in which no position sees another.


def _mean(*args: Any, **kwargs: Any) -> Pooling | None:
    # torch also takes NumPy's names.
    names = {"input": "x", "self": "x", "axis": "dim", "keepdims": "keepdim"}
    return _mean_over(*args, **{names.get(name, name): value for name, value in kwargs.items()})


def _mean_over(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> Pooling | None:
    if x.dim() != 4 or dim is None or dtype not in (None, x.dtype) or out is not None:
        return None
    dims = tuple(d % x.dim() for d in ([dim] if isinstance(dim, int) else dim))
    return Pooling(x, dims, (1,) * len(dims), keepdim)


def _adaptive_pooling(x: Tensor, output_size: Any) -> Pooling | None:
    sizes = _two(output_size)
    if x.dim() != 4 or None in sizes:
        return None
    return Pooling(x, (2, 3), tuple(sizes), keepdim=True)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Normalization | None:
    return Normalization(x, num_groups, weight, bias, eps) if x.dim() == 4 else None


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Normalization | None:
    if x.dim() != 4 or not use_input_stats:
        return None
    return Normalization(x, x.shape[1], weight, bias, eps)


def _interpolate(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Resampled | None:
    by_size = size is not None or bool(recompute_scale_factor) or bool(align_corners)
    if x.dim() != 4 or not by_size:
        return None
    if size is None:
        size = [int(length * factor) for length, factor in zip(x.shape[2:], _two(scale_factor), strict=True)]
    height, width = _two(size)
    return Resampled(x, Resampling(mode, bool(align_corners), antialias), (int(height), int(width)))


def _two(value: Any) -> Any:
    return value if isinstance(value, Sequence) else (value, value)


RECOGNIZED: dict[Any, Callable[..., Call | None]] = {
    torch.mean: _mean,
    Tensor.mean: _mean,
    F.adaptive_avg_pool2d: _adaptive_pooling,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    torch.instance_norm: _instance_norm,
    F.interpolate: _interpolate,
}
