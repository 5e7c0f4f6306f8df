"""Where the outputs of tiles go: into tensors, into files mapped to memory, or to a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polynl.beyond.tiles.calls import core_of
from polynl.beyond.tiles.grid import Tile
from polynl.beyond.tiles.sites import Map

Write = Callable[[str, slice, slice, Tensor], None]
Out = str | Path | Write | None


class Outputs:
    """The network's result, put together from tiles. As a context, it leaves no incomplete file behind."""

    def __init__(self, maps: Sequence[Map], out: Out) -> None:
        self._maps, self._out = maps, out
        self._whole: list[Any] = [None] * len(maps)
        self._files: dict[int, tuple[Path, Path]] = {}
        self._structure: Any = None

    @property
    def dense(self) -> bool:
        """Whether a part of the result is a map, so that all tiles are needed."""
        return any(map_.tracks is not None for map_ in self._maps)

    def add(self, tile: Tile, output: Any) -> None:
        """Put the result of a tile in its place."""
        named, self._structure = pytree.tree_flatten_with_path(output)
        for number, ((path, tensor), map_) in enumerate(zip(named, self._maps, strict=True)):
            if map_.tracks is None:
                self._whole[number] = tensor
                continue
            axes = map_.axes(tile)
            rows, columns = (slice(*axis.core) for axis in axes)
            name = pytree.keystr(path).strip("[]'.\"")
            part = core_of(tensor, axes)
            if callable(self._out):
                self._out(name, rows, columns, part)
            else:
                place = [slice(None)] * tensor.dim()
                place[axes[0].dim], place[axes[1].dim] = rows, columns
                self._store(number, name, map_, tensor)[tuple(place)] = _storable(self._out, part)

    def _store(self, number: int, name: str, map_: Map, like: Tensor) -> Any:
        if self._whole[number] is None:
            self._whole[number] = (
                torch.empty(map_.shape, dtype=like.dtype)
                if self._out is None
                else self._mapped_file(number, name, map_, like)
            )
        return self._whole[number]

    def _mapped_file(self, number: int, name: str, map_: Map, like: Tensor) -> Any:
        import numpy as np

        assert isinstance(self._out, str | Path)
        path = Path(self._out)
        if sum(one.tracks is not None for one in self._maps) > 1:
            path = path.with_stem(f"{path.stem}-{name}")
        temporary = path.with_name(f".{path.name}.tmp")
        self._files[number] = (temporary, path)
        dtype = _storable(self._out, like[:0]).dtype
        return np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=map_.shape)

    def result(self) -> Any:
        """What the model would have returned; maps as arrays in their files, or None if written elsewhere."""
        for number, (temporary, path) in self._files.items():
            self._whole[number].flush()
            temporary.replace(path)
        self._files.clear()
        return pytree.tree_unflatten(self._whole, self._structure)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *error: object) -> None:
        for temporary, _path in self._files.values():
            temporary.unlink(missing_ok=True)


def check_out(out: Out) -> None:
    """Raise an error if the file cannot be written, before there is work to lose."""
    if out is None or callable(out):
        return
    if Path(out).suffix != ".npy":
        raise ValueError(f"out={str(out)!r}: expected a file that ends in .npy, or a function")
    if Path(out).is_dir():
        raise IsADirectoryError(f"out={str(out)!r} is a folder; expected a file")
    if not Path(out).parent.is_dir():
        raise FileNotFoundError(f"out={str(out)!r}: there is no folder {Path(out).parent}")
    if not os.access(Path(out).parent, os.W_OK):
        raise PermissionError(f"out={str(out)!r}: the folder {Path(out).parent} is not writable")


def _storable(out: Out, part: Tensor) -> Any:
    """As a tensor or, for a file, as an array; NumPy has no bfloat16."""
    if out is None:
        return part.cpu()
    return (part.float() if part.dtype == torch.bfloat16 else part).cpu().numpy()
