"""Files that annotations name: below their folder, and there."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from pathlib import Path

from polynl.errors import SettingsError


def leaves(name: str) -> bool:
    """Whether a path leads out of its folder, on any system.

    >>> [leaves(name) for name in ("a/b.jpg", "../b.jpg", "/b.jpg", "C:\\\\b.jpg")]
    [False, True, True, True]
    """
    parts = name.replace("\\", "/").split("/")
    return not parts[0] or ".." in parts or parts[0][1:2] == ":" or "\0" in name


def check_there(names: Iterable[str], folder: Path, *, annotations: Path) -> None:
    """Raise a SettingsError where images that the annotations name are not in the folder.

    A folder is read once: to ask for each of many files would take long.
    """
    parts = [posixpath.split(name) for name in names]
    there: set[tuple[str, str]] = set()
    try:
        for below in {below for below, _ in parts}:
            if (folder / below).is_dir() or not below:
                with os.scandir(folder / below) as entries:
                    there.update((below, entry.name) for entry in entries if entry.is_file())
    except OSError as error:
        raise SettingsError(f"{error.filename}, with images, cannot be read: {error.strerror}.") from None
    missing = [posixpath.join(*part) for part in parts if part not in there]
    if missing:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise SettingsError(
            f"{annotations}: {len(missing):,} of {len(parts):,} images are not in {folder}: {some}."
        )
