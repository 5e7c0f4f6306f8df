"""The tiles of an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One axis of a tile, in pixels: its core, and the core with the halo."""

    core_start: int
    core_stop: int
    start: int
    stop: int
    size: int
    """Of the image."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of an image."""

    spans: tuple[Span, Span]

    def __str__(self) -> str:
        rows, columns = self.spans
        return f"rows {rows.start} to {rows.stop - 1}, columns {columns.start} to {columns.stop - 1}"


@dataclass(frozen=True)
class Grid:
    """The tiles, row by row."""

    sizes: tuple[int, int]
    tile: tuple[int, int]
    """The side of a core, in pixels."""
    halos: tuple[tuple[int, int], tuple[int, int]]
    """Pixels before and after the core, of the rows and of the columns."""
    strides: tuple[int, int]
    """The network's, which halos and the sides of cores are multiples of."""

    def __iter__(self) -> Iterator[Tile]:
        rows, columns = (self._spans(axis) for axis in range(2))
        return (Tile((row, column)) for row in rows for column in columns)

    def __len__(self) -> int:
        return len(self._spans(0)) * len(self._spans(1))

    def _spans(self, axis: int) -> list[Span]:
        size, side, (before, after) = self.sizes[axis], self.tile[axis], self.halos[axis]
        # Networks may pad odd sizes in other ways ("same" padding): a tile is odd if the image is.
        after += size % self.strides[axis]
        cores = [(start, min(start + side, size)) for start in range(0, size, side)]
        # A short rest at the end is read together with the tile before it: networks have a smallest image.
        halos = [before if stop - start == side else max(before, side) for start, stop in cores]
        return [
            Span(start, stop, max(0, start - halo), min(size, stop + after), size)
            for (start, stop), halo in zip(cores, halos, strict=True)
        ]

    def pixels(self) -> int:
        """The pixels of all tiles with their halos: those of the image, and what is computed twice."""
        rows, columns = (sum(span.stop - span.start for span in self._spans(axis)) for axis in range(2))
        return rows * columns
