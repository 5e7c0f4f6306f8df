"""Influence maps packed for the page, which shows that of the cell under the pointer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polynl.explain import influence
from polynl.explain.capture import capture

# More cells than this a side could not be told apart under a finger, and would make the page large.
CELLS = 16
STEPS = 127


@dataclass(frozen=True)
class PackedMaps:
    """Of every cell of a map, the share of every cell in it, as whole steps of a scale of its own."""

    grid: tuple[int, int]
    """Rows and columns of the cells that are asked about."""
    sources: tuple[int, int]
    """Rows and columns of those that contribute."""
    scales: list[float]
    """The largest share, by its size, in the map of each cell."""
    shares: str
    """Signed bytes in base64, map after map: 127 is the scale."""

    def to_json(self) -> dict[str, Any]:
        """As the page reads it."""
        return {"grid": self.grid, "sources": self.sources, "scales": self.scales, "shares": self.shares}


def cell_maps(model: nn.Module, images: Any, block: str) -> Tensor:
    """Who contributes to what a block adds in every cell of one image: (rows, columns, h', w').

    A cell is a position of the block's map or, so that there are at most `CELLS` a side, some positions
    together: the map is that of their mean. The padding of detectors is cut off.
    """
    captured = capture(model, images, modules=[block])
    module, x, (frame,) = model.get_submodule(block), captured.activations[block].input, captured.frames
    rows, columns = (list(_runs(size)) for size in frame.crop(x[0, 0]).shape)
    maps = []
    for row in rows:
        for column in columns:
            place = torch.zeros_like(x[:, 0])
            place[:, row, column] = 1.0 / place[:, row, column].numel()
            maps.append(coarser(frame.crop(influence(module, x, place)[0])))
    return torch.stack(maps).unflatten(0, (len(rows), len(columns)))


def _runs(size: int) -> Iterator[slice]:
    """At most `CELLS` runs of equally many positions; the last may have fewer."""
    step = -(-size // CELLS)
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def coarser(shares: Tensor) -> Tensor:
    """A map with at most `CELLS` a side, in which the shares of neighbours are added: the sum stays."""
    steps = [-(-size // CELLS) for size in shares.shape]
    bottom, right = (-size % step for size, step in zip(shares.shape, steps, strict=True))
    padded = F.pad(shares, (0, right, 0, bottom))
    return F.avg_pool2d(padded[None, None], steps)[0, 0] * (steps[0] * steps[1])


def packed(maps: Tensor) -> PackedMaps:
    """Maps (h, w, h', w') of shares; what is no number counts as no share."""
    maps = maps.nan_to_num(0.0, 0.0, 0.0)
    scales = maps.abs().amax(dim=(2, 3), keepdim=True)
    steps = torch.where(scales > 0, maps / scales * STEPS, 0.0).round().to(torch.int8)
    shown = [float(f"{scale:.4g}") for scale in scales.flatten().tolist()]
    content = base64.b64encode(steps.contiguous().numpy().tobytes()).decode()
    rows, columns, high, wide = maps.shape
    return PackedMaps((rows, columns), (high, wide), shown, content)
