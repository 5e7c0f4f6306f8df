"""Interpolation of a tile as it would be done on the whole map, whose size decides where the samples lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SUPPORTED = ("nearest", "nearest-exact", "bilinear")


@dataclass(frozen=True)
class Resampling:
    """The options of `torch.nn.functional.interpolate`."""

    mode: str
    align_corners: bool
    antialias: bool

    def why_not_in_tiles(self) -> str | None:
        """What of it is not supported on tiles."""
        if self.antialias:
            return "interpolates with antialias=True"
        if self.mode not in SUPPORTED:
            return f"interpolates with mode={self.mode!r}; tiles support {', '.join(SUPPORTED)}"
        return None

    def of_whole(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """As torch does it."""
        corners = {"align_corners": self.align_corners} if self.mode in ("bilinear", "bicubic") else {}
        return F.interpolate(x, size, mode=self.mode, antialias=self.antialias, **corners)

    def of_tile(
        self, x: Tensor, size: tuple[int, int], before: Sequence[Any], after: Sequence[Any]
    ) -> Tensor:
        """The samples of a tile; before and after are the axes of the input and of the output."""
        for source, target, count in zip(before, after, size, strict=True):
            x = self._along(x, source, target, count)
        return x

    def _along(self, x: Tensor, source: Any, target: Any, count: int) -> Tensor:
        """One axis: every sample is the nearest position, or a weighted mean of two neighbours."""
        place, dim = self._places(x, source.size, target.size, target.start, count), source.dim
        lower = place.floor()
        if self.mode != "bilinear":
            return x.index_select(dim, self._local(lower, source, x))
        upper = (lower + 1).clamp(max=source.size - 1)
        below, above = (x.index_select(dim, self._local(edge, source, x)) for edge in (lower, upper))
        weight = (place - lower).to(x.device, x.dtype).view([-1 if d == dim else 1 for d in range(x.dim())])
        return torch.lerp(below, above, weight.expand_as(below))

    def _places(self, x: Tensor, source: int, target: int, start: int, count: int) -> Tensor:
        """Where the samples from `start` on lie in the whole input, rounded as torch does.

        Between two positions that are equally near, rounding decides. There torch's own choice in double
        precision depends on the layout of the map.
        """
        double = x.dtype == torch.float64 and self.mode == "bilinear"
        one = torch.ones((), dtype=torch.float64 if double else torch.float32)
        sample = torch.arange(start, start + count, dtype=one.dtype)
        if self.align_corners:
            place = sample * (one * (source - 1) / (target - 1) if target > 1 else 0)
        elif self.mode == "nearest":
            place = sample * (one * source / target)
        else:
            place = (sample + 0.5) * (one * source / target)
            place = place if self.mode == "nearest-exact" else place - 0.5
        return place.clamp(0, source - 1)

    def _local(self, place: Tensor, source: Any, x: Tensor) -> Tensor:
        """Indices in the tile; those outside of it are in the halo of the output, which is not used."""
        return (place - source.start).clamp(0, x.shape[source.dim] - 1).long().to(x.device)
