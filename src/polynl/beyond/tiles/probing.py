"""Find how far a network looks beyond a tile, and refuse a network that cannot be run in tiles.

NaN goes wherever a value goes. So a strip with NaN on one side of a boundary shows how far beyond the
boundary its pixels matter; and two overlapping parts of a strip show whether the network does the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polynl.beyond.tiles.calls import Axis, Call
from polynl.beyond.tiles.grid import Span, Tile
from polynl.beyond.tiles.running import run_on_tile
from polynl.beyond.tiles.sites import Map, Network, NotTiledError, Site, Track, tensors_in

# Pixels on either side of the boundary: the first attempt, and the last.
SHORTEST, LONGEST = 256, 2048
# Pixels across the strip, or more if the network's stride needs them.
WIDTH = 64
AXES = ("rows", "columns")

# In place of how far a pixel matters: all along the strip, or at places that are far from it.
ALL, FAR = -1, -2

Halos = tuple[tuple[int, int], tuple[int, int]]


def find_halos(network: Network, channels: int, like: Tensor) -> Halos:
    """Pixels that a tile needs before and after itself, of rows and of columns: multiples of the strides."""
    return _find_halo(network, channels, like, 0), _find_halo(network, channels, like, 1)


def _find_halo(network: Network, channels: int, like: Tensor, axis: int) -> tuple[int, int]:
    stride, half = network.strides[axis], 0
    while half < LONGEST:
        half = _multiple(max(SHORTEST, 2 * half), stride)
        strip = Strip.of(network, channels, like, axis, 2 * half)
        before, after = (strip.reach(boundary=half, after=after) for after in (False, True))
        if before is not None and after is not None:
            drift = strip.network.drift(axis)
            long = Strip.of(network, channels, like, axis, before + after + 2 * drift + 6 * stride)
            long.check_shifted(stride, before + drift, after + drift)
            return before + network.drift(axis), after + network.drift(axis)
    raise NotTiledError(strip.culprit(half, after=before is not None))


def _multiple(length: int, stride: int) -> int:
    return -(-length // stride) * stride


@dataclass(frozen=True)
class Strip:
    """A long and narrow image of noise, and the network on it."""

    network: Network
    image: Tensor
    axis: int

    @classmethod
    def of(cls, network: Network, channels: int, like: Tensor, axis: int, length: int) -> Strip:
        """A strip along an axis."""
        across = network.strides[1 - axis]
        width = _multiple(max(WIDTH, 2 * across), across)
        shape = (1, channels, length, width) if axis == 0 else (1, channels, width, length)
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(like)
        return cls(network.resized(shape), noise, axis)

    @property
    def length(self) -> int:
        """Along the axis."""
        return self.image.shape[2 + self.axis]

    def reach(self, boundary: int, *, after: bool) -> int | None:
        """How many pixels beyond the boundary those on its other side matter; None if all the way."""
        reached = [
            self._reach(*one, boundary, after) for one in self._run(self._spoiled(boundary, after=after))
        ]
        if FAR in reached:
            raise NotTiledError(self.culprit(boundary, after=after))
        return None if ALL in reached else max(reached, default=0)

    def _reach(self, map_: Map, tensor: Tensor, boundary: int, after: bool) -> int:
        if map_.tracks is None:
            return FAR if tensor.isnan().any() else 0
        track = map_.tracks[self.axis]
        spoiled = _spoiled_positions(tensor, track)
        spoiled = spoiled.flip(0) if after else spoiled
        count, there = int(spoiled.sum()), track.place(boundary)
        if not spoiled[:count].all():
            return FAR
        beyond = count - (track.size - there if after else there)
        return ALL if count == track.size else max(0, -(-beyond // track.growth) * track.stride)

    def check_shifted(self, stride: int, before: int, after: int) -> None:
        """Raise an error unless two parts of the strip that overlap agree where neither lacks its halo."""
        parts = []
        for start, stop in ((0, self.length - stride), (stride, self.length)):
            part = self.image.narrow(2 + self.axis, start, stop - start)
            parts.append(self._run(part, self._tile(start, stop)))
        for (map_, one), (_, other) in zip(*parts, strict=True):
            if map_.tracks is not None:
                track = map_.tracks[self.axis]
                low, high = track.place(stride + before), track.place(self.length - stride - after)
                one = one.narrow(track.dim, low, high - low)
                other = other.narrow(track.dim, low - track.growth, high - low)
            if not _close(one, other):
                raise NotTiledError(
                    f"the network does not do the same at all {AXES[self.axis]}, perhaps because of a "
                    "position embedding: it cannot be run in tiles"
                )

    def culprit(self, boundary: int, *, after: bool) -> str:
        """Which module lets a pixel matter everywhere, in words."""
        outputs: list[list[Tensor]] = []
        with _watched(self.network.model, outputs):
            self._run(self._spoiled(boundary, after=after))
        for (name, maps), tensors in zip(self.network.modules, outputs, strict=True):
            for map_, tensor in zip(maps, tensors, strict=True):
                if self._reach(map_, tensor, boundary, after) < 0:
                    module = type(self.network.model.get_submodule(name)).__name__
                    return (
                        f"{name or 'the network'}, a {module}, cannot be run in tiles: a pixel has an effect "
                        f"on distant {AXES[self.axis]} there, in a way that is not known to add up over tiles"
                    )
        return f"the network cannot be run in tiles: a pixel has an effect on all {AXES[self.axis]}"

    def _spoiled(self, boundary: int, *, after: bool) -> Tensor:
        image = self.image.clone()
        start, count = (boundary, self.length - boundary) if after else (0, boundary)
        image.narrow(2 + self.axis, start, count).fill_(torch.nan)
        return image

    def _tile(self, start: int, stop: int) -> Tile:
        spans = [Span(0, size, 0, size, size) for size in self.image.shape[2:]]
        spans[self.axis] = Span(start, stop, start, stop, self.length)
        return Tile((spans[0], spans[1]))

    def _run(self, image: Tensor, tile: Tile | None = None) -> list[tuple[Map, Tensor]]:
        """The maps before all calls that need a pass, and the outputs."""
        seen: list[tuple[Map, Tensor]] = []

        def answer(site: Site, call: Call, axes: Sequence[Axis]) -> Tensor:
            if not site.reduces():
                return call.apply(None, axes)
            seen.append((site.before, call.x.clone()))
            return call.neutral()

        tile = self._tile(0, self.length) if tile is None else tile
        output = run_on_tile(self.network.model, image, self.network.sites, tile, answer)
        return seen + list(zip(self.network.outputs, tensors_in(output), strict=True))


def _spoiled_positions(tensor: Tensor, track: Track) -> Tensor:
    return tensor.isnan().movedim(track.dim, 0).flatten(1).any(dim=1)


def _close(one: Tensor, other: Tensor) -> bool:
    """Up to rounding, in any precision: whether the network is the same, not how well it rounds."""
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 0.05
    return bool(((one - other).abs() <= tolerance * (one.abs().max() + 1e-12)).all())


@contextmanager
def _watched(model: nn.Module, outputs: list[list[Tensor]]) -> Iterator[None]:
    """Keep what every module returns."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append([tensor.clone() for tensor in tensors_in(output)])

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
