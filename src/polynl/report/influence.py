"""Influence maps for the page, which shows the map of the cell under the pointer."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polynl.explain import influence
from polynl.explain.capture import Spot, capture

# More cells per side could not be told apart under a finger, and would make the page large.
CELLS = 16
STEPS = 127


def cell_maps(model: nn.Module, images: Any, block: str) -> Tensor:
    """The influence map of every cell of one image: (rows, columns, h', w').

    A cell is a position of the block's map or, if there are more than `CELLS` per side, the mean of several.
    The padding of detectors is cut off.
    """
    captured = capture(model, images, modules=[block])
    module, seen, (frame,) = model.get_submodule(block), captured.activations[block], captured.frames
    x = seen.input
    rows, columns = (list(_runs(size)) for size in frame.crop(x[0, 0]).shape)
    maps = []
    for row in rows:
        for column in columns:
            place = torch.zeros_like(x[:, 0])
            place[:, row, column] = 1.0 / place[:, row, column].numel()
            maps.append(coarser(frame.crop(influence(module, x, place, mask=seen.mask)[0])))
    return torch.stack(maps).unflatten(0, (len(rows), len(columns)))


def _runs(size: int) -> Iterator[slice]:
    """At most `CELLS` runs of equal length; the last may be shorter."""
    step = -(-size // CELLS)
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def cell_at(spot: Spot | None, image: Sequence[int], grid: Sequence[int]) -> tuple[int, ...]:
    """The row and column at a spot, in pixels of the image, or at the middle of a box or of the whole image.

    >>> cell_at((8.0, 0.0), (16, 32), (4, 8)), cell_at((0.0, 0.0, 32.0, 16.0), (16, 32), (4, 8))
    ((0, 2), (2, 4))
    """
    height, width = image
    left, top, right, bottom = (0, 0, width, height) if spot is None else spot if len(spot) == 4 else spot * 2
    place = (top + bottom) / 2 / height, (left + right) / 2 / width
    return tuple(min(max(int(at * size), 0), size - 1) for at, size in zip(place, grid, strict=True))


def coarser(shares: Tensor) -> Tensor:
    """A map with at most `CELLS` per side, in which the shares of neighbours are added up."""
    steps = [-(-size // CELLS) for size in shares.shape]
    bottom, right = (-size % step for size, step in zip(shares.shape, steps, strict=True))
    padded = F.pad(shares, (0, right, 0, bottom))
    return F.avg_pool2d(padded[None, None], steps)[0, 0] * (steps[0] * steps[1])


def packed(maps: Tensor) -> dict[str, Any]:
    """Maps (h, w, h', w') of shares as JSON for the page; values that are not finite count as no share.

    `grid` and `sources` are the rows and columns of the cells and of their contributors, `scales` the largest
    absolute share of each map, and `shares` signed bytes in base64, map after map: 127 is the scale.
    """
    maps = maps.nan_to_num(0.0, 0.0, 0.0)
    scales = maps.abs().amax(dim=(2, 3), keepdim=True)
    steps = torch.where(scales > 0, maps / scales * STEPS, 0.0).round().to(torch.int8)
    return {
        "grid": tuple(maps.shape[:2]),
        "sources": tuple(maps.shape[2:]),
        "scales": [float(f"{scale:.4g}") for scale in scales.flatten().tolist()],
        "shares": base64.b64encode(steps.contiguous().numpy().tobytes()).decode(),
    }
