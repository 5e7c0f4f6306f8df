"""What a network makes of one large image: class scores, features, influence on a pixel."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polynl.beyond.tiles import run_tiled
from polynl.beyond.tiles.until import Until
from polynl.data.large_images import thumbnail
from polynl.explain.capture import Frame, block_of
from polynl.explain.explanation import Explanation
from polynl.explain.figures import DPI, influence_figure
from polynl.explain.influence import check_contributions, influence_in_parts
from polynl.explain.networks import ExplainedNetwork
from polynl.files import temporary_folder, write_atomically

# Pixels on a side of the picture beside an influence map, and cells of the map as it is drawn.
PICTURE, CELLS = 1000, 256
# How many numbers of a map are in memory at a time.
CHUNK = 2**24


@dataclass(frozen=True)
class Large:
    """A reader of an image (3, h, w), the network, and how to run one on the other."""

    reader: Any
    network: ExplainedNetwork
    tile: int
    folder: Path
    """For files that are there while it runs: maps may be too large for the system's temporary folder."""
    keep: bool
    """Whether features are kept between passes."""

    def logits(self) -> Tensor:
        """One for each class."""
        (logits,) = self._run(self.network.model)
        return logits

    def features(self, module: str, file: Path) -> Any:
        """What a module returns, as an array in a .npy file."""
        return self._run(Until(self.network.model, module), out=file)

    def influence(self, block: str | None, pixel: tuple[float, float]) -> Tensor:
        """The share (h, w) of every position of a block's map in what it adds at a pixel."""
        name = block_of(self.network.model, block)
        module = check_contributions(self.network.model.get_submodule(name))
        height, width = self.reader.shape[-2:]
        frame = Frame(height, width)
        frame.cells(pixel, (1, 1))  # raises an error before there is work to lose
        with temporary_folder("polynl-map", self.folder) as folder:
            x = self._run(Until(self.network.model, name, before=True), out=folder / "x.npy")
            if x.ndim != 4:
                raise ValueError(f"{name} gets {x.shape}; expected a map (b, c, h, w)")
            row, column = (cells.start for cells in frame.cells(pixel, x.shape[-2:]))
            device = next(module.parameters()).device
            parts = _Rows(x, getattr(module, "pool_size", 1), device)
            query = torch.from_numpy(np.array(x[:, :, row, column])).to(device)
            return torch.cat([part[0].cpu() for part in influence_in_parts(module, query, parts)])

    def _run(self, model: Any, **options: Any) -> Any:
        keep = self.folder if self.keep else None
        return run_tiled(model, self.reader, self.tile, prepare=self._prepare, keep=keep, **options)

    def _prepare(self, pixels: Tensor) -> Any:
        """A batch of one uint8 image as the network takes it."""
        return self.network.inputs(pixels[0])


class _Rows(Sequence[Tensor]):
    """A map (b, c, h, w) in a file, some rows at a time: a multiple of `unit`, and the rest."""

    def __init__(self, x: Any, unit: int | Sequence[int], device: torch.device) -> None:
        self._x, self._device = x, device
        unit = unit if isinstance(unit, int) else unit[0]
        count = -(-max(1, CHUNK // (x.shape[1] * x.shape[3])) // unit) * unit
        # The last part has at least as many rows as the others: it could be too small for a window.
        starts = [start for start in range(0, x.shape[2], count) if start == 0 or start + count <= x.shape[2]]
        self._spans = list(zip(starts, [*starts[1:], x.shape[2]], strict=True))

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        """The part of that number."""
        start, stop = self._spans[index]
        return torch.from_numpy(np.array(self._x[:, :, start:stop])).to(self._device)


def write_influence(large: Large, shares: Tensor, pixel: tuple[float, float], path: Path) -> None:
    """Write the shares as a .npy file, and drawn over the image as a .png file beside it."""
    array = io.BytesIO()
    np.save(array, shares.numpy())
    write_atomically(path, array.getbuffer())
    picture = thumbnail(large.reader, PICTURE)
    scale = picture.shape[-1] / large.reader.shape[-1]
    spot = pixel[0] * scale, pixel[1] * scale
    pooled = max(1, -(-max(shares.shape) // CELLS))
    sums = F.avg_pool2d(shares[None], pooled, ceil_mode=True, divisor_override=1)[0]
    figure = influence_figure([Explanation(large.network, picture, spot=spot, shares=sums)])
    assert figure is not None
    png = io.BytesIO()
    with matplotlib.rc_context({"font.size": 10}):
        figure.savefig(png, dpi=DPI, bbox_inches="tight")
    write_atomically(path.with_suffix(".png"), png.getbuffer())
