"""What a model did on every image that it was scored on: the scores of any choice of the images follow."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polynl.errors import SettingsError
from polynl.files import write_atomically

Array = np.ndarray[Any, Any]
IMAGES, TRUTH = "images", "truth"
# What NumPy and zipfile raise for damaged files.
UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
# The file in the folder of a run.
OUTCOMES = "outcomes.npz"


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Arrays whose meaning is the task's, about images in the order of their names.

    `truth` is what there was to find in every image; models can be compared if theirs is the same.
    """

    images: Array
    """The names of the images."""
    truth: Array
    arrays: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def telling(self) -> int:
        """The number of images that have something to find: a class, or at least one object."""
        return len(self) if self.truth.ndim == 1 else int(self.truth.reshape(len(self), -1).any(1).sum())

    def save(self, path: Path) -> None:
        """Write a file for `load`."""
        file = io.BytesIO()
        arrays: dict[str, Any] = {IMAGES: self.images, TRUTH: self.truth, **self.arrays}
        np.savez_compressed(file, **arrays)
        write_atomically(path, file.getvalue())

    @classmethod
    def load(cls, path: Path) -> Outcomes:
        """Read a file of `save`; a SettingsError says what is wrong with it."""
        try:
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            found = cls(arrays.pop(IMAGES), arrays.pop(TRUTH), arrays)
            finite = all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f")
            if not (finite and len(found.images) == len(found.truth) > 0):
                raise ValueError
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from None
        except UNREADABLE:
            raise SettingsError(
                f"{path} is not a file of outcomes, or is damaged. Delete it: `polynl compare` and `polynl "
                "reproduce --resume` then score the last weights of the run."
            ) from None
        return found

    def difference(self, other: Outcomes) -> str | None:
        """Why these outcomes cannot be compared with others, if they cannot."""
        if len(self) != len(other):
            return f"{len(self):,} images, and {len(other):,}"
        differing = np.flatnonzero(self.images != other.images)
        if len(differing):
            first = differing[0]
            return f"{self.images[first]}, and {other.images[first]}"
        if self.truth.shape != other.truth.shape:
            return f"{self.truth.shape[1:]} numbers for each image, and {other.truth.shape[1:]}"
        differing = np.flatnonzero((self.truth != other.truth).reshape(len(self), -1).any(1))
        return f"{self.images[differing[0]]} with different labels" if len(differing) else None
