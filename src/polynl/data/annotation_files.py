"""What annotation files say, checked: lines, names of images, coordinates."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polynl.errors import SettingsError, shortened

# pycocotools walks along a polygon pixel by pixel: one that is far off takes forever, or crashes.
FURTHEST = 1e6
_NUMBERS = frozenset((int, float))


def read_lines(path: Path, *, remedy: str = "") -> list[str]:
    """The lines of a UTF-8 file, without blank ones at its end; a SettingsError says why it is not read."""
    try:
        return path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.{remedy}") from None
    except UnicodeDecodeError as error:
        # The wrong byte does not end a line, so it is in the last line up to it.
        read = error.object[: error.start + 1]
        raise SettingsError(
            f"{path}, line {len(read.splitlines())}: byte {read[-1]:#04x} is not UTF-8; save the file as "
            "UTF-8 text."
        ) from None


def is_count(text: str) -> bool:
    """Whether a text is a whole number, from 0 on and not absurdly large."""
    return text.isascii() and text.isdigit() and len(text) < 10


def are_coordinates(values: list[Any]) -> bool:
    """Whether these are numbers of pixels, not absurdly far from the image."""
    return (
        _NUMBERS.issuperset(map(type, values))
        and min(values) > -FURTHEST
        and max(values) < FURTHEST
        and not math.isnan(sum(values))
    )


def leaves(name: str) -> bool:
    """Whether a path leads out of its folder, on any system.

    >>> [leaves(name) for name in ("a/b.jpg", "../b.jpg", "/b.jpg", "C:\\\\b.jpg")]
    [False, True, True, True]
    """
    parts = name.replace("\\", "/").split("/")
    return not parts[0] or ".." in parts or parts[0][1:2] == ":" or "\0" in name


def check_there(names: Iterable[str], folder: Path, *, annotations: Path) -> None:
    """Raise a SettingsError if images that the annotations name are not in the folder.

    Each folder is listed once: looking up many files one by one would take long.
    """
    parts = [posixpath.split(name) for name in names]
    there: set[tuple[str, str]] = set()
    try:
        for below in {below for below, _ in parts}:
            if (folder / below).is_dir() or not below:
                with os.scandir(folder / below) as entries:
                    there.update((below, entry.name) for entry in entries if entry.is_file())
    except OSError as error:
        raise SettingsError(f"folder {error.filename} of images cannot be read: {error.strerror}.") from None
    missing = [posixpath.join(*part) for part in parts if part not in there]
    if missing:
        raise SettingsError(
            f"{annotations}: {len(missing):,} of {len(parts):,} images are not in {folder}: "
            f"{shortened(missing)}."
        )
