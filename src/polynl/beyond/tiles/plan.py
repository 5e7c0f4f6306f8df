"""What a run in tiles will do: its tiles, its passes and their cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from polynl.beyond.tiles.grid import Grid
from polynl.beyond.tiles.probing import Halos, check_halos, find_halos
from polynl.beyond.tiles.sites import Network, NotTiledError, Site

Pair = int | tuple[int, int]
"""A number for rows and columns, or one for each."""


@dataclass(frozen=True)
class TilePlan:
    """The tiles of an image and the calls of a network that need a pass over all of them."""

    network: Network
    grid: Grid

    @property
    def reducing(self) -> list[Site]:
        """The calls that need a pass, in the order in which they come."""
        return [site for site in self.network.sites if site.reduces()]

    @property
    def dense(self) -> bool:
        """Whether the result has a map, so that the last pass needs all tiles."""
        return any(map_.tracks is not None for map_ in self.network.outputs)

    def runs(self) -> int:
        """How many times the network is run on a tile."""
        tiles = len(self.grid)
        return 1 if tiles == 1 else tiles * len(self.reducing) + (tiles if self.dense else 1)

    def work(self, *, keep: bool = False) -> float:
        """How much is computed, divided by what the network computes on the whole image at once."""
        height, width = self.grid.sizes
        halo = self.grid.pixels() / (height * width)
        if keep or len(self.grid) == 1:
            return halo
        passes = [site.flops for site in self.reducing]
        last = self.network.flops if self.dense else self.network.flops / len(self.grid)
        return halo * (sum(passes) + last) / max(self.network.flops, 1)

    def describe(self, *, keep: bool = False) -> str:
        """The plan in a sentence or two."""
        (height, width), ((above, below), (left, right)) = self.grid.tile, self.grid.halos
        tiles = len(self.grid)
        if tiles == 1:
            return "The image fits into one tile: one pass."
        needing = ", ".join(site.module or "the network itself" for site in self.reducing)
        passes = f"{len(self.reducing) + 1} passes, for {needing} and" if needing else "1 pass, for"
        last = "the output" if self.dense else "the output, which needs one tile"
        return (
            f"{tiles} tiles of {height} × {width} pixels, with halos of up to {max(above, below)} rows and "
            f"{max(left, right)} columns. {passes} {last}: "
            f"{self.work(keep=keep):.1f} times the work of the whole image at once."
        )

    def __str__(self) -> str:
        return self.describe()


def make_plan(
    model: nn.Module,
    shape: tuple[int, ...],
    like: Tensor,
    tile: Pair,
    halo: Pair | None = None,
    stride: Pair | None = None,
) -> TilePlan:
    """The plan for an image of a shape (b, c, h, w); a NotTiledError if the model cannot be run in tiles."""
    check_evaluating(model)
    network = Network(model, shape, like)
    if stride is not None:
        network.strides = pair("stride", stride, network.strides)
    for site in network.sites:
        site.check()
    for map_ in network.outputs:
        if map_.tracks is not None and not map_.dtype.is_floating_point:
            raise NotTiledError(
                f"the network returns a map of {map_.dtype}; tiles need floating-point values, such as scores"
            )
    sizes = (shape[2], shape[3])
    sides = pair("tile", tile)
    if all(side >= size for side, size in zip(sides, sizes, strict=True)):
        return TilePlan(network, Grid(sizes, sizes, ((0, 0), (0, 0)), network.strides))
    if halo is None:
        halos = find_halos(network, shape[1], like)
    else:
        above, left = pair("halo", halo, network.strides, least=0)
        halos = (above, above), (left, left)
        check_halos(network, shape[1], like, halos)
    rounded = tuple(_rounded(network, sides[axis], sizes[axis], halos, axis) for axis in range(2))
    return TilePlan(network, Grid(sizes, (rounded[0], rounded[1]), halos, network.strides))


def check_evaluating(model: nn.Module) -> None:
    """Raise an error if a module is in training mode, where batch norms and dropout see the whole batch."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    for name, module in model.named_modules():
        if module.training:
            place = f"its module {name}, a {type(module).__name__}," if name else "it"
            raise NotTiledError(
                f"the model cannot be run in tiles: {place} is in training mode; call model.eval()"
            )


def pair(name: str, value: Pair, multiple_of: tuple[int, int] = (1, 1), least: int = 1) -> tuple[int, int]:
    """A number for rows and one for columns, checked."""
    values = tuple(value) if isinstance(value, tuple | list) else (value, value)
    whole = len(values) == 2 and all(isinstance(one, int) and not isinstance(one, bool) for one in values)
    if not whole or isinstance(value, bool) or min(values) < least:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}, or two of them")
    if any(one % unit for one, unit in zip(values, multiple_of, strict=True)):
        raise ValueError(f"{name}={value!r}: expected a multiple of the network's stride, {multiple_of}")
    return values[0], values[1]


def _rounded(network: Network, side: int, size: int, halos: Halos, axis: int) -> int:
    """The side of a tile as a multiple of what the network needs, or the whole image."""
    if side >= size:
        return size
    units = [network.strides[axis], *(site.unit(axis) for site in network.sites if site.reduces())]
    unit, halo = math.lcm(*units), max(halos[axis])
    if side < max(halo, unit):
        what = "halo" if halo >= unit else "stride"
        raise ValueError(
            f"tile={side} is smaller than the {what} of {max(halo, unit)} pixels that this network needs; "
            f"use at least {max(halo, unit)}"
        )
    return side // unit * unit
