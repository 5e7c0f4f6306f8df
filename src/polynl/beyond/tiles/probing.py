"""Find how far a network looks beyond a tile, and refuse a network that cannot be run in tiles.

NaN goes wherever a value goes. So a strip with NaN on one side of a boundary shows how far beyond the
boundary its pixels matter; and a tile of a strip shows whether the network does there what it does in the
whole strip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polynl.beyond.tiles.calls import Axis, Call
from polynl.beyond.tiles.grid import Span, Tile
from polynl.beyond.tiles.running import run_on_tile
from polynl.beyond.tiles.sites import Map, Network, NotTiledError, Site, Track, named_modules, tensors_in

# Pixels on either side of the boundary: the first attempt, and the last.
SHORTEST, LONGEST = 256, 2048
# Pixels across the strip, or more if the stride needs them; Inception networks fail below 75.
WIDTH = 96
AXES = ("rows", "columns")

# In place of how far a pixel matters: all along the strip, or at places that are far from it.
ALL, FAR = -1, -2

# Operations with floating-point results in which NaN gets lost.
LOSING = ("sign", "sgn", "nan_to_num", "fmax", "fmin")

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
            halo = before + network.drift(axis), after + network.drift(axis)
            if _departure(network, channels, like, axis, halo) is None:
                return halo
            ample = halo[0] + half, halo[1] + half
            if (module := _departure(network, channels, like, axis, ample)) is not None:
                raise NotTiledError(
                    f"{module} does not do the same at all {AXES[axis]} or for all sizes, perhaps because "
                    "of a position embedding: it cannot be run in tiles"
                )
            raise NotTiledError(
                f"more than {max(halo)} {AXES[axis]} beyond a tile matter to this network, perhaps because "
                "it crops its maps; how many cannot be found: pass them as halo="
            )
    raise NotTiledError(strip.culprit(half, after=before is not None))


def check_halos(network: Network, channels: int, like: Tensor, halos: Halos) -> None:
    """Raise an error if halos are too small, or if the network cannot be run in tiles at all."""
    for axis, halo in enumerate(halos):
        if _departure(network, channels, like, axis, halo) is not None:
            needed = max(_find_halo(network, channels, like, axis))
            raise ValueError(f"a halo of {halo[0]} {AXES[axis]} is too small: this network needs {needed}")


def _departure(network: Network, channels: int, like: Tensor, axis: int, halo: tuple[int, int]) -> str | None:
    """The first module whose result in a tile is not that of the whole strip, in words."""
    length = sum(halo) + 8 * network.strides[axis]
    return Strip.of(network, channels, like, axis, length).departure(*halo)


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
        """A strip along an axis, of that length and the rest that the strides leave of the image."""
        across = network.strides[1 - axis]
        sides = [length, _multiple(max(WIDTH, 2 * across), across)]
        height, width = (
            side + rest for side, rest in zip(sides[:: 1 - 2 * axis], network.rests, strict=True)
        )
        shape = (1, channels, height, width)
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(like)
        return cls(network.resized(shape), noise, axis)

    @property
    def length(self) -> int:
        """Along the axis."""
        return self.image.shape[2 + self.axis]

    def reach(self, boundary: int, *, after: bool) -> int | None:
        """How many pixels beyond the boundary those on its other side matter; None if all the way."""
        with _Losses(self.network.model) as losses:
            seen = self._run(self._spoiled(boundary, after=after))
        for name, operation in losses.found:
            raise NotTiledError(
                f"{self.network.described(name)} decides by the values of its map ({operation}), so that how "
                "far a pixel matters cannot be found: pass it as halo="
            )
        reached = [self._reach(*one, boundary, after) for one in seen]
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

    def departure(self, before: int, after: int) -> str | None:
        """The first module that gives something else in a tile's core than in the whole strip, if any."""
        stride, rest = self.network.strides[self.axis], self.network.rests[self.axis]
        start, stop = stride, self.length - 2 * stride
        part = self.image.narrow(2 + self.axis, start, stop - start)

        def agree(map_: Map, whole: Tensor, ours: Tensor) -> bool:
            if map_.tracks is not None:
                track = map_.tracks[self.axis]
                low, high, offset = map(track.place, (start + before, stop - rest - after, start))
                whole = whole.movedim(track.dim, 0)[low:high]
                ours = ours.movedim(track.dim, 0)[low - offset : high - offset]
            return _close(whole, ours)

        in_whole: list[list[Tensor]] = []
        in_tile: list[list[Tensor]] = []
        with _watched(self.network.model, in_whole):
            expected = self._run(self.image)
        with _watched(self.network.model, in_tile):
            found = self._run(part, self._tile(start, stop))
        if all(agree(map_, whole, ours) for (map_, whole), (_, ours) in zip(expected, found, strict=True)):
            return None
        for (name, maps), *tensors in zip(self.network.modules, in_whole, in_tile, strict=True):
            if not all(map(agree, maps, *tensors)):
                return self.network.described(name)
        return "the network"

    def culprit(self, boundary: int, *, after: bool) -> str:
        """Which module lets a pixel matter everywhere, in words."""
        outputs: list[list[Tensor]] = []
        with _watched(self.network.model, outputs):
            self._run(self._spoiled(boundary, after=after))
        for (name, maps), tensors in zip(self.network.modules, outputs, strict=True):
            for map_, tensor in zip(maps, tensors, strict=True):
                if self._reach(map_, tensor, boundary, after) < 0:
                    return (
                        f"{self.network.described(name)} cannot be run in tiles: a pixel has an effect on "
                        f"distant {AXES[self.axis]} there, in a way that is not known to add up over tiles"
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


class _Losses(TorchDispatchMode):
    """Finds operations in which NaN gets lost, by the module that is running."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._names: list[str] = []
        self._watching = named_modules(model, self._names, [])

    def __enter__(self) -> _Losses:
        self._watching.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        result = func(*args, **(kwargs or {}))
        name, outputs = func.name().removeprefix("aten::"), tensors_in(result)
        discrete = outputs and not any(one.is_floating_point() for one in outputs)
        if (discrete or name in LOSING) and any(one.isnan().any() for one in tensors_in(args)):
            self.found.append((self._names[-1] if self._names else "", name.partition(".")[0]))
        return result


def _spoiled_positions(tensor: Tensor, track: Track) -> Tensor:
    return tensor.isnan().movedim(track.dim, 0).flatten(1).any(dim=1)


def _close(one: Tensor, other: Tensor) -> bool:
    """Up to rounding, in any precision: whether the network is the same, not how well it rounds."""
    if one.shape != other.shape:
        return False
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-4}.get(one.dtype, 0.05)
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
