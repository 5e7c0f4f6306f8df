"""Images too large to decode as a whole: readers with a shape (3, h, w) and slices `[..., y0:y1, x0:x1]`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from polynl.data.images import MOST_PIXELS, UnreadableImageError, read_image

LARGE_SUFFIXES = {".npy", ".tif", ".tiff", ".zarr"}
CHANNELS = (1, 3, 4)


class Pixels:
    """A uint8 image in an array that is read in parts: (h, w), or with 1, 3 or 4 channels first or last.

    Grey becomes RGB, and a fourth channel is left out. `path` is for errors.
    """

    def __init__(self, array: Any, path: Path) -> None:
        shape, dtype = tuple(array.shape), np.dtype(array.dtype)
        if dtype != np.uint8:
            raise ValueError(f"its values are {dtype}; expected uint8, from 0 to 255")
        if len(shape) not in (2, 3) or 0 in shape:
            raise ValueError(f"its shape is {shape}; expected (h, w), (h, w, channels) or (channels, h, w)")
        self._array, self._path, self._axis = array, path, self._channel_axis(shape)
        self.shape = (3, *(size for axis, size in enumerate(shape) if axis != self._axis))

    def _channel_axis(self, shape: tuple[int, ...]) -> int | None:
        if len(shape) == 2:
            return None
        # Where both ends could be the channels, the last is: so are images in files.
        for axis in (2, 0):
            if shape[axis] in CHANNELS:
                return axis
        raise ValueError(f"its shape is {shape}; expected 1, 3 or 4 channels, first or last")

    def __getitem__(self, key: tuple[Any, slice, slice]) -> Tensor:
        """Rows and columns as a tensor (3, h, w)."""
        with _errors_naming(self._path):
            return self._read(*key[-2:])

    def _read(self, rows: slice, columns: slice) -> Tensor:
        match self._axis:
            case None:
                part = np.asarray(self._array[rows, columns])[None]
            case 0:
                part = np.asarray(self._array[:, rows, columns])
            case _:
                part = np.asarray(self._array[rows, columns]).transpose(2, 0, 1)
        part = np.repeat(part, 3, axis=0) if part.shape[0] == 1 else part[:3]
        return torch.from_numpy(np.array(part))  # a copy: files mapped to memory are read-only


@contextmanager
def open_large(path: Path) -> Iterator[Any]:
    """A reader of the image in a file, or an UnreadableImageError that names it.

    NumPy's .npy files, zarr arrays and, with tifffile and zarr installed, TIFF files of 8-bit grey or colour
    are read in parts. Others are decoded as a whole, as uint8.
    """
    with ExitStack() as opened:
        with _errors_naming(path):
            reader = _reader(path, opened)
        yield reader


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    try:
        yield
    except UnreadableImageError:
        raise
    except Exception as error:  # decoders raise anything for a broken file
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = words.strip().partition("\n")[0].removesuffix(".") or type(error).__name__
        raise UnreadableImageError(f"{path} is not a readable image: {reason}") from error


def _reader(path: Path, opened: ExitStack) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return Pixels(np.load(path, mmap_mode="r"), path)
    if suffix == ".zarr":
        return Pixels(_first_array(path), path)
    if suffix in (".tif", ".tiff") and (array := _tiff(path, opened)) is not None:
        return Pixels(array, path)
    return _whole(path)


def _tiff(path: Path, opened: ExitStack) -> Any:
    """The first page as an array that is read in parts; None if it is one that PIL has to convert."""
    if not all(importlib.util.find_spec(package) for package in ("tifffile", "zarr")):
        return None
    import tifffile

    file = opened.enter_context(tifffile.TiffFile(path))
    page: Any = file.pages[0]
    colours = page.photometric in (tifffile.PHOTOMETRIC.RGB, tifffile.PHOTOMETRIC.MINISBLACK)
    upright = "Orientation" not in page.tags or page.tags["Orientation"].value == 1
    if page.dtype != np.uint8 or not colours or not upright or page.planarconfig != 1:
        return None
    array = _first_array(opened.enter_context(page.aszarr()))
    try:
        array[0:1, 0:1]
    except Exception:  # a compression for which imagecodecs is missing, or a broken file: PIL knows more
        return None
    return array


def _whole(path: Path) -> Tensor:
    """The image, decoded."""
    width, height = _size(path)
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"it is {width:,} × {height:,} pixels large, and at most {MOST_PIXELS:,} are decoded at once. "
            "Larger ones are read in parts from .npy, .zarr and, if tifffile and zarr are installed (for "
            "some compressions imagecodecs, too), 8-bit TIFF files"
        )
    return read_image(path, upright=True)


def _size(path: Path) -> tuple[int, int]:
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(path) as image:
            return image.size
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _first_array(store: Any) -> Any:
    """The array in a zarr store; of a group of levels, the first, which is the largest."""
    import zarr

    found: Any = zarr.open(store, mode="r")
    while not hasattr(found, "dtype"):
        names = sorted(found)
        if not names:
            raise ValueError("it has no array")
        found = found[names[0]]
    return found


def thumbnail(reader: Any, side: int, band: int = 256) -> Tensor:
    """A small uint8 image (3, h, w), no side longer than `side`, of single pixels that lie equally far apart.

    `band` is how many rows are read at a time: what is compressed is decoded by blocks.
    """
    height, width = reader.shape[-2:]
    step = max(1, -(-max(height, width) // side))
    band = -(-band // step) * step
    bands = (reader[..., y : min(y + band, height), 0:width] for y in range(0, height, band))
    return torch.cat([part[..., ::step, ::step] for part in bands], dim=-2)
