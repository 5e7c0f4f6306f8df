"""Where in a network the calls are that need the whole map, and how large the maps are.

The network runs on tensors without data (torch's fake tensors), so this costs nothing for images of any size.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from polynl.beyond.tiles.calls import Axis, Call, Pooling, Resampled, calls
from polynl.beyond.tiles.grid import Tile

# Operations that look for values at computed places, which may be anywhere in a map.
SAMPLING = ("aten::grid_sampler_2d", "torchvision::deform_conv2d")
# Images are made this much larger to see how maps grow: a multiple of all strides that networks have.
GROWTH = 2**8 * 3 * 5 * 7


class NotTiledError(ValueError):
    """A network cannot be run in tiles."""


@dataclass(frozen=True)
class Track:
    """An axis of a map that grows with the image: by `growth` positions for every `stride` pixels."""

    dim: int
    size: int
    growth: int
    stride: int

    def place(self, pixel: int) -> int:
        """The position that begins at a pixel, which is a multiple of the stride."""
        return pixel // self.stride * self.growth

    def within(self, tile: Tile, number: int) -> Axis:
        """The axis in a tile."""
        span = tile.spans[number]
        high = self.size if span.core_stop == span.size else min(self.place(span.core_stop), self.size)
        low = min(self.place(span.core_start), high)
        return Axis(self.dim, self.place(span.start), (low, high), self.size)


@dataclass(frozen=True)
class Map:
    """A tensor of a network: its shape for the whole image, and its tracks if it grows with the image."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tracks: tuple[Track, Track] | None

    def axes(self, tile: Tile) -> list[Axis]:
        """Where a tile lies in the map; in one that does not grow, everywhere."""
        if self.tracks is None:
            sizes = list(enumerate(self.shape))[-2:]
            return [Axis(dim, 0, (0, size), size) for dim, size in sizes]
        return [track.within(tile, number) for number, track in enumerate(self.tracks)]


@dataclass(frozen=True)
class Site:
    """A call that may need care: in which module, on which map, and what was computed before it."""

    call: Call
    module: str
    before: Map
    after: Map
    flops: int

    def needs_whole(self) -> bool:
        """Whether the call as it is would give another result on a tile than on the whole map."""
        if isinstance(self.call, Pooling):
            tracks = self.before.tracks
            return tracks is not None and {track.dim for track in tracks} <= set(self.call.dims)
        return self.before.tracks is not None or self.after.tracks is not None

    def reduces(self) -> bool:
        """Whether it needs a pass over all tiles."""
        return self.call.reduces and self.needs_whole()

    def axes(self, tile: Tile) -> list[Axis]:
        """Those of its input, and of its output if it is an interpolation."""
        return self.before.axes(tile) + (self.after.axes(tile) if isinstance(self.call, Resampled) else [])

    def unit(self, axis: int) -> int:
        """The pixels of which a tile's start has to be a multiple."""
        assert self.before.tracks is not None
        track, unit = self.before.tracks[axis], self.call.unit(axis)
        return track.stride * (unit // math.gcd(unit, track.growth))

    def drift(self, axis: int) -> int:
        """The pixels by which an interpolation may shift the map, as sizes are not exact multiples."""
        if not isinstance(self.call, Resampled) or self.before.tracks is None or self.after.tracks is None:
            return 0
        before, after = self.before.tracks[axis], self.after.tracks[axis]
        positions = abs(before.size - after.size * before.growth / after.growth)
        positions += self.call.resampling.align_corners
        return math.ceil(positions / before.growth) * before.stride

    def check(self) -> None:
        """Raise an error if the call cannot give the same on tiles."""
        reason = self.call.why_not_in_tiles()
        if isinstance(self.call, Resampled) and self.before.tracks and not self.after.tracks:
            reason = f"interpolates to the fixed size {tuple(self.after.shape[2:])}"
        if self.needs_whole() and reason is not None:
            raise NotTiledError(f"{self.module or 'the network'} cannot be run in tiles: {reason}")


@dataclass
class Record:
    """What a network did on fake tensors: calls, outputs of modules, the result, the size of every tensor."""

    calls: list[tuple[Call, str, tuple[Tensor, Tensor], int]] = field(default_factory=list)
    modules: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    output: Any = None
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """For every shape, the module that was running."""
    sampling: list[str] = field(default_factory=list)
    """The modules that sample maps at computed places."""
    flops: int = 0


class _Shapes(TorchDispatchMode):
    def __init__(self, found: Record, names: list[str]) -> None:
        super().__init__()
        self._found, self._names = found, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = self._names[-1] if self._names else ""
        if func.name() in SAMPLING:
            self._found.sampling.append(name)
        for one in tensors_in(result):
            self._found.shapes.append(tuple(one.shape))
            self._found.places.append(name)
        return result


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def record(model: nn.Module, shape: Sequence[int], like: Tensor) -> Record:
    """Run the model on a fake image with the dtype and device of `like`."""
    found = Record()
    names: list[str] = []
    flops = FlopCounterMode(display=False)

    def handle(call: Call, as_it_is: Callable[[], Any]) -> Any:
        done, name = flops.get_total_flops(), names[-1] if names else ""
        after = call.neutral() if call.reduces else as_it_is()
        found.calls.append((call, name, (call.x, after), done))
        return after

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(named_modules(model, names, found.modules))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        log = logging.getLogger("torch._subclasses.fake_tensor")  # says in 40 lines what the error says
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)
        image = torch.empty(*shape, dtype=like.dtype, device=like.device)
        stack.enter_context(flops)
        stack.enter_context(_Shapes(found, names))
        stack.enter_context(calls(model, handle))
        try:
            found.output = model(image)
        except Exception as error:
            size = " × ".join(map(str, shape[2:]))
            raise NotTiledError(
                f"the network cannot be run in tiles: an image of {size} pixels fails in it with "
                f"{type(error).__name__}: {error}"
            ) from error
    found.flops = flops.get_total_flops()
    return found


@contextmanager
def named_modules(
    model: nn.Module, names: list[str], outputs: list[tuple[str, list[Tensor]]]
) -> Iterator[None]:
    """Keep the names of the modules that are running, and what each returns."""
    handles = []
    for name, module in model.named_modules():

        def enter(_: nn.Module, args: Any, name: str = name) -> None:
            names.append(name)

        def leave(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            names.pop()
            outputs.append((name, tensors_in(output)))

        handles += [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Network:
    """A network on an image of some size, and how its tensors grow with it, from records of three sizes."""

    def __init__(self, model: nn.Module, shape: Sequence[int], like: Tensor) -> None:
        b, c, h, w = shape
        self.model, self._like, self._size = model, like, (h, w)
        self._small = record(model, shape, like)
        for name in self._small.sampling:
            raise NotTiledError(
                f"{self.described(name)} cannot be run in tiles: it samples a map at computed places, "
                "which may be anywhere"
            )
        self._large = [record(model, (b, c, *size), like) for size in ((h + GROWTH, w), (h, w + GROWTH))]
        self._whole = self._small
        self._check_alike()
        self.strides = (self._stride(0), self._stride(1))

    @property
    def rests(self) -> tuple[int, int]:
        """The rows and columns of the image that its strides leave over."""
        return self._size[0] % self.strides[0], self._size[1] % self.strides[1]

    def resized(self, shape: Sequence[int]) -> Network:
        """The same network on an image of another size."""
        other = copy.copy(self)
        for name in ("sites", "outputs", "modules"):
            vars(other).pop(name, None)
        other._whole = record(self.model, shape, self._like)
        other._check_alike()
        return other

    def _check_alike(self) -> None:
        for one in (self._whole, *self._large):
            names = [(type(call), module) for call, module, _, _ in one.calls]
            expected = [(type(call), module) for call, module, _, _ in self._small.calls]
            if names != expected or len(one.shapes) != len(self._small.shapes):
                raise NotTiledError(
                    f"{self._departure(one)} computes other things for images of another size: "
                    "it cannot be run in tiles"
                )

    def _departure(self, other: Record) -> str:
        """The module in which one of two records has something that the other has not."""
        short, long = sorted((self._small.places, other.places), key=len)
        differing = (b for a, b in itertools.zip_longest(short, long) if a != b)
        return self.described(next(differing, ""))

    def described(self, module: str) -> str:
        """A module in words."""
        return f"{module or 'the network'}, a {type(self.model.get_submodule(module)).__name__},"

    def _stride(self, axis: int) -> int:
        """The pixels after which the network repeats itself: the least common multiple of all strides."""
        strides = {1}
        for small, large in zip(self._small.shapes, self._large[axis].shapes, strict=True):
            if len(small) == len(large):
                grown = {b - a for a, b in zip(small, large, strict=True)} - {0}
                strides |= {GROWTH // math.gcd(GROWTH, length) for length in grown}
        return math.lcm(*strides)

    def _map(self, whole: Tensor, small: Tensor, *large: Tensor) -> Map:
        """The map of a tensor, given the same one in all records."""
        shape, tracks = tuple(whole.shape), []
        for grown, stride in zip(large, self.strides, strict=True):
            dims = [d for d, (a, b) in enumerate(zip(small.shape, grown.shape, strict=False)) if a != b]
            if len(dims) == 1:
                growth = (grown.shape[dims[0]] - small.shape[dims[0]]) * stride // GROWTH
                tracks.append(Track(dims[0], shape[dims[0]], growth, stride))
        if len(tracks) != 2 or tracks[0].dim == tracks[1].dim:
            return Map(shape, whole.dtype, None)
        return Map(shape, whole.dtype, (tracks[0], tracks[1]))

    def _records(self) -> Iterator[Record]:
        return iter((self._whole, self._small, *self._large))

    @cached_property
    def sites(self) -> list[Site]:
        """One for every call."""
        found = []
        for row in zip(*(one.calls for one in self._records()), strict=True):
            call, module, _, flops = row[0]
            before, after = (self._map(*(one[2][side] for one in row)) for side in (0, 1))
            found.append(Site(call, module, before, after, flops))
        return found

    @cached_property
    def outputs(self) -> list[Map]:
        """The maps of the network's result."""
        leaves = [pytree.tree_leaves(one.output) for one in self._records()]
        if not leaves[0] or not all(isinstance(leaf, Tensor) for one in leaves for leaf in one):
            kinds = sorted({type(leaf).__name__ for leaf in leaves[0]} - {"FakeTensor"})
            raise NotTiledError(f"the network returns {', '.join(kinds) or 'nothing'}; expected tensors")
        return [self._map(*row) for row in zip(*leaves, strict=True)]

    @cached_property
    def modules(self) -> list[tuple[str, list[Map]]]:
        """The maps that every module returns, in the order in which they are done."""
        return [
            (row[0][0], [self._map(*tensors) for tensors in zip(*(one[1] for one in row), strict=True)])
            for row in zip(*(one.modules for one in self._records()), strict=True)
        ]

    def drift(self, axis: int) -> int:
        """The pixels by which interpolations may shift maps, all together."""
        return sum(site.drift(axis) for site in self.sites)

    @property
    def flops(self) -> int:
        """What the network computes on the whole image."""
        return self._whole.flops
