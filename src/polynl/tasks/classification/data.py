"""Folders of images, one for each class, as ImageNet has them."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import make_dataset
from torchvision.transforms import InterpolationMode, v2

from polynl.data.config import Split
from polynl.data.images import IMAGE_SUFFIXES, Unreadable, read_image, read_or_stand_in
from polynl.errors import shortened


def train_transform(
    size: int,
    scale: tuple[float, float],
    flip: float,
    *,
    jitter: float = 0.0,
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
) -> v2.Transform:
    """A random crop, resized, and flipped with probability `flip`; uint8 stays uint8.

    Brightness, contrast and saturation are multiplied by random factors from 1 - `jitter` to 1 + `jitter`.
    """
    steps: list[v2.Transform] = [
        v2.RandomResizedCrop(size, scale=scale, interpolation=interpolation, antialias=True),
        v2.RandomHorizontalFlip(flip),
    ]
    if jitter > 0:
        steps.append(v2.ColorJitter(brightness=jitter, contrast=jitter, saturation=jitter))
    return v2.Compose(steps)


def class_folders(root: Path) -> list[str]:
    """The names of the folders in `root`, sorted; not those that programs leave behind.

    Hidden ones, such as .ipynb_checkpoints, contain copies of images; __MACOSX comes with zip files.
    """
    return sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not _is_left_behind(entry.name)
    )


def _is_left_behind(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


class FolderImages(Dataset[Any]):
    """The images below `root`, one folder for each class: (image as uint8, label).

    Hidden files and folders are left out, and so are files with other suffixes, which `ignored` counts. A
    class without images is a FileNotFoundError. `on_bad_image` "stop": an image that cannot be decoded
    raises; "skip": it becomes an `Unreadable`. With `upright`, photos are turned by their EXIF orientation.
    `part` selects the images held out for validation, or all others; see `held_out`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: v2.Transform,
        *,
        on_bad_image: Literal["stop", "skip"],
        upright: bool = False,
        part: tuple[Split, float] | None = None,
    ) -> None:
        self._root, self._read = Path(root), partial(read_image, upright=upright)
        self.ignored: Counter[str] = Counter()
        numbers = {name: number for number, name in enumerate(class_folders(self._root))}
        self._samples = make_dataset(os.fspath(root), numbers, is_valid_file=self._is_image, allow_empty=True)
        self._check_filled(numbers)
        if part is not None:
            split, share = part
            held = held_out([(self._relative(path), label) for path, label in self._samples], share)
            kept = zip(self._samples, held, strict=True)
            self._samples = [sample for sample, is_held in kept if is_held == (split == "val")]
        self._transform, self._stops = transform, on_bad_image == "stop"

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, index: int) -> str:
        """The image's file, below `root`."""
        return self._relative(self._samples[index][0])

    def notes(self) -> list[str]:
        """A sentence about the files that were ignored, if there are any."""
        if not self.ignored:
            return []
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in self.ignored.most_common())
        return [f"Files in {self._root} that are not images are ignored: {kinds}."]

    def _is_image(self, path: str) -> bool:
        """Whether a file is one of the images; if it is not, and not hidden either, it is counted."""
        inside, suffix = Path(path).relative_to(self._root), Path(path).suffix.lower()
        if any(map(_is_left_behind, inside.parts)):
            return False
        if suffix not in IMAGE_SUFFIXES:
            self.ignored[suffix or "without a suffix"] += 1
        return suffix in IMAGE_SUFFIXES

    def _check_filled(self, numbers: Mapping[str, int]) -> None:
        filled = {label for _, label in self._samples}
        if empty := [name for name, number in numbers.items() if number not in filled]:
            others = f"; there are files of other kinds ({', '.join(self.ignored)})" if self.ignored else ""
            raise FileNotFoundError(
                f"{self._root} has no images in {shortened(empty)}{others}. Remove such a folder, or add "
                f"images: {', '.join(sorted(IMAGE_SUFFIXES))}."
            )

    def _relative(self, path: str) -> str:
        return Path(path).relative_to(self._root).as_posix()

    def __getitem__(self, index: int) -> tuple[Tensor, int] | Unreadable:
        path, label = self._samples[index]
        image = read_or_stand_in(path, stops=self._stops, remedy="Fix or remove it", read=self._read)
        return image if isinstance(image, Unreadable) else (self._transform(image), label)


def held_out(samples: Sequence[tuple[str, int]], share: float) -> list[bool]:
    """For every (name, label), whether it is held out for validation: a share of each class, at least one.

    The names alone decide, by their hashes. So every run holds out the same images, whatever its seed, and
    new images move few of the others. The only image of a class is not held out.

    >>> sum(held_out([(f"{number}.jpg", number % 2) for number in range(20)], 0.2))
    4
    """
    classes: dict[int, list[int]] = {}
    for index, (_, label) in enumerate(samples):
        classes.setdefault(label, []).append(index)
    held = [False] * len(samples)
    for members in classes.values():
        count = min(max(1, round(share * len(members))), len(members) - 1)
        for index in sorted(members, key=lambda index: _digest(samples[index][0]))[:count]:
            held[index] = True
    return held


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
