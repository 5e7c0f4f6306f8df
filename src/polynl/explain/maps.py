"""Influence maps of a block in a network, for points and boxes of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polynl.explain.capture import Frame, Images, Spot, as_given, block_of, passed
from polynl.explain.influence import influence


def influence_map(
    model: nn.Module, images: Images, spot: Spot | Sequence[Spot] | Tensor, *, block: str | None = None
) -> Any:
    """The share of every position in what a block adds at a spot of the image: (b, h, w), each summing to 1.

    `spot`: a point x, y or a box left, top, right, bottom in pixels of the image, for all or one for each;
    tensors will do, such as the boxes that a detector finds.
    `images`, `block`: as of `feature_norms`. See :func:`polynl.explain.influence` for what a share is. Maps
    of a detector's images are without the padding, which may have a share as well.
    """
    name = block_of(model, block)
    seen, frames = passed(model, images, name)
    spots = _spots(spot, len(frames))
    places = torch.zeros_like(seen.x[:, 0])
    for place, frame, where in zip(places, frames, spots, strict=True):
        inside = place[(..., *_cells(frame, where, seen.x.shape[-2:]))]
        inside.fill_(1.0 / inside.numel())
    shares = influence(model.get_submodule(name), seen.x, places)
    return as_given(images, [frame.cut(share) for share, frame in zip(shares, frames, strict=True)])


def influence_maps(model: nn.Module, image: Tensor, *, block: str | None = None) -> Tensor:
    """The maps of all positions of one image (3, h, w): (rows, columns, h, w), the first two of the position.

    The memory is that of the result. Like `influence_map`, of a detector's image without the padding.
    """
    if image.dim() != 3:
        raise ValueError(f"image has the shape {tuple(image.shape)}; expected (3, h, w)")
    name = block_of(model, block)
    seen, (frame,) = passed(model, image, name)
    module, (rows, columns) = model.get_submodule(name), frame.cut(seen.x).shape[-2:]
    maps = [
        frame.cut(influence(module, seen.x, (row, column))[0])
        for row in range(rows)
        for column in range(columns)
    ]
    return torch.stack(maps).unflatten(0, (rows, columns))


def _spots(spot: Spot | Sequence[Spot] | Tensor, images: int) -> Sequence[Spot]:
    given: list[Any] = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in spot]
    each = len(given) == 0 or isinstance(given[0], Sequence)
    spots: Any = [tuple(entry) for entry in given] if each else [tuple(given)] * images
    if len(spots) != images or any(len(entry) not in (2, 4) for entry in spots):
        raise ValueError(
            f"spot={spot}: expected x, y or left, top, right, bottom, for all or for each of {images} images"
        )
    return spots


def _cells(frame: Frame, spot: Spot, shape: Sequence[int]) -> tuple[slice, slice]:
    if len(spot) == 4:
        return frame.cells(spot, shape)
    row, column = frame.cell(*spot, shape)
    return slice(row, row + 1), slice(column, column + 1)
