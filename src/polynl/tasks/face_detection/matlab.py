"""Matlab's files of version 5, as far as WIDER FACE uses them: cells, matrices of numbers, and texts.

SciPy reads them too, but a single wrong byte can crash the process. The layout is in "MAT-File Format" by
The MathWorks: a header, then elements, each with a tag of 8 bytes that has its type and size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np

from polynl.errors import SettingsError
from polynl.tasks.face_detection.metric import Array

# Cells column by column, or a text, or numbers as float64.
Value: TypeAlias = "list[Value] | str | Array"

HEADER = 128
# Types of elements.
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
TEXTS = {1: "ascii", 2: "ascii", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}
# Classes of matrices: any of numbers is read as float64, whatever it is stored as.
CELLS, CHARACTERS, NUMERIC = 1, 4, range(6, 16)
COMPLEX = 0x800
# The largest variable of the official files has 0.8 MB, and the deepest is two cells deep.
MOST_BYTES, DEEPEST = 1 << 24, 8


def read_matlab(path: Path, names: Collection[str]) -> dict[str, Value]:
    """The variables of these names, if they are there; a SettingsError names a file that is damaged."""
    try:
        content = path.read_bytes()
        # Version and byte order.
        if content[124:HEADER] != b"\x00\x01IM":
            raise ValueError("expected a little-endian file of version 5, as Matlab saves with -v7")
        matrices = map(_matrix_in, _elements(memoryview(content)[HEADER:]))
        return {name: _value(parts) for name, parts in map(_named, matrices) if name in names}
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, zlib.error) as error:
        raise SettingsError(f"{path} cannot be read as a Matlab file: {error}; download it again.") from None


Element = tuple[int, memoryview]


def _elements(data: memoryview) -> Iterator[Element]:
    """The type and the content of one element after the other."""
    place = 0
    while place < len(data):
        if len(data) - place < 8:
            raise ValueError("it ends within a tag")
        kind, size = struct.unpack_from("<II", data, place)
        if kind >> 16:  # a small element: type and size share four bytes, the content has the other four
            kind, size, start, place = kind & 0xFFFF, kind >> 16, place + 4, place + 8
            if size > 4:
                raise ValueError(f"a small element has {size} bytes")
        else:
            start = place + 8
            # All but compressed elements are filled up to a multiple of 8 bytes.
            place = start + size + (0 if kind == COMPRESSED else -size % 8)
        if start + size > len(data):
            raise ValueError(
                f"it is truncated: an element has {size:,} bytes, and {len(data) - start:,} follow"
            )
        yield kind, data[start : start + size]


def _matrix_in(element: Element) -> memoryview:
    """The content of a variable, which may be compressed."""
    kind, data = element
    if kind == COMPRESSED:
        unzip = zlib.decompressobj()
        plain = unzip.decompress(data, MOST_BYTES)
        if not unzip.eof or unzip.unused_data:
            raise ValueError(f"a compressed variable is damaged, or has more than {MOST_BYTES:,} bytes")
        ((kind, data),) = _next(1, _elements(memoryview(plain)))
    if kind != MATRIX:
        raise ValueError(f"expected a matrix, got an element of type {kind}")
    return data


Parts = tuple[int, tuple[int, int], Iterator[Element]]


def _named(matrix: memoryview) -> tuple[str, Parts]:
    """The name of a matrix; its class, its rows and columns, and the elements with its content."""
    elements = _elements(matrix)
    (_, flags), (_, dimensions), (_, name) = _next(3, elements)
    if len(flags) != 8 or len(dimensions) != 8:
        raise ValueError("expected matrices of two dimensions")
    word, rows, columns = struct.unpack("<I4x", flags)[0], *struct.unpack("<ii", dimensions)
    if word & COMPLEX or rows < 0 or columns < 0:
        raise ValueError(f"expected real numbers, got a matrix of {rows} × {columns} with flags {word:#x}")
    return bytes(name).decode("ascii"), (word & 0xFF, (rows, columns), elements)


def _value(parts: Parts, depth: int = 0) -> Value:
    kind, (rows, columns), elements = parts
    if kind == CELLS:
        if depth == DEEPEST:
            raise ValueError(f"its cells are nested more than {DEEPEST} deep")
        cells = [_cell(element, depth + 1) for element in elements]
        if len(cells) != rows * columns:
            raise ValueError(f"expected {rows * columns:,} cells, got {len(cells):,}")
        return cells
    if kind != CHARACTERS and kind not in NUMERIC:
        raise ValueError(f"expected cells, texts and numbers, got a matrix of class {kind}")
    ((stored, data),) = _next(1, elements)
    if kind == CHARACTERS:
        if stored not in TEXTS:
            raise ValueError(f"a text has elements of type {stored}")
        text = bytes(data).decode(TEXTS[stored])
        if len(text) != rows * columns or rows > 1:
            raise ValueError(f"a text of {rows} × {columns} characters has {len(text)}")
        return text
    if stored not in NUMBERS or len(data) != rows * columns * np.dtype(NUMBERS[stored]).itemsize:
        raise ValueError(f"{rows} × {columns} numbers have {len(data)} bytes of type {stored}")
    numbers = np.frombuffer(data, NUMBERS[stored]).astype(np.float64)
    return numbers.reshape((rows, columns), order="F")


def _cell(element: Element, depth: int) -> Value:
    # Matlab writes an empty matrix as nothing at all.
    empty = element[0] == MATRIX and not element[1]
    return np.zeros((0, 0)) if empty else _value(_named(_matrix_in(element))[1], depth)


def _next(count: int, elements: Iterator[Element]) -> list[Element]:
    found = list(islice(elements, count))
    if len(found) < count:
        raise ValueError(f"expected {count} elements, got {len(found)}")
    return found
