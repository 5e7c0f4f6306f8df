"""Read an image tile by tile from whatever has a shape and can be sliced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polynl.beyond.tiles.grid import Tile

Prepare = Callable[[Tensor], Tensor]


class Image:
    """A tensor, an array or a reader of shape (c, h, w) or (b, c, h, w), with `[..., y0:y1, x0:x1]`."""

    def __init__(self, source: Any, prepare: Prepare | None, like: Tensor) -> None:
        shape = getattr(source, "shape", None)
        if shape is None or not hasattr(source, "__getitem__"):
            raise TypeError(
                f"image is a {type(source).__name__}; expected a tensor, an array, or a reader with a shape "
                "and slices [..., y0:y1, x0:x1]"
            )
        sizes = tuple(map(int, shape))
        if len(sizes) not in (3, 4) or 0 in sizes:
            raise ValueError(f"image has shape {sizes}; expected (c, h, w) or (b, c, h, w), none of them 0")
        self.shape = sizes if len(sizes) == 4 else (1, *sizes)
        self._source, self._prepare, self._like = source, prepare, like

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.shape[2], self.shape[3]

    def channels(self) -> int:
        """What the model gets, which `prepare` may have changed."""
        return self._prepared(torch.zeros(self.shape[0], self.shape[1], 2, 2, dtype=self._dtype())).shape[1]

    def _dtype(self) -> torch.dtype:
        part = _tensor(self._source[..., 0:1, 0:1])
        return part.dtype

    def read(self, tile: Tile) -> Tensor:
        """The tile with its halo, as the model takes it; an error if it is incomplete or not finite."""
        rows, columns = tile.spans
        expected = (*self.shape[:2], rows.stop - rows.start, columns.stop - columns.start)
        part = _tensor(self._source[..., rows.start : rows.stop, columns.start : columns.stop])
        part = part if part.dim() == 4 else part[None]
        if tuple(part.shape) != expected:
            raise ValueError(
                f"the image ends early: {tile} have shape {tuple(part.shape)}, and its shape {self.shape} "
                f"promises {expected}"
            )
        x = self._prepared(part).to(self._like.device, self._like.dtype)
        if not x.isfinite().all():
            raise ValueError(f"the image has NaN or infinite values in {tile}")
        return x

    def _prepared(self, part: Tensor) -> Tensor:
        x = part if self._prepare is None else self._prepare(part)
        if not x.is_floating_point():
            raise TypeError(
                f"image has dtype {x.dtype}; the model takes {self._like.dtype}: pass prepare=, a function "
                "of the pixels such as lambda x: x / 255"
            )
        if x.dim() != 4 or x.shape[2:] != part.shape[2:]:
            raise ValueError(
                f"prepare made {tuple(x.shape)} of {tuple(part.shape)}; expected a function of single pixels"
            )
        return x


def _tensor(part: Any) -> Tensor:
    if isinstance(part, Tensor):
        return part
    import numpy as np

    return torch.from_numpy(np.array(part))  # a copy: files mapped to memory may be read-only
