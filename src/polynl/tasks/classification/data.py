"""Folders of images, one for each class, as ImageNet has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from polynl.data.images import Unreadable, read_or_stand_in


def train_transform(size: int, scale: tuple[float, float], flip: float) -> v2.Transform:
    """A random crop, resized, and flipped with probability `flip`; uint8 stays uint8."""
    crop = v2.RandomResizedCrop(size, scale=scale, antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip(flip)])


class FolderImages(Dataset[Any]):
    """The images below `root`, one folder for each class: (image as uint8, label).

    `on_bad_image` "stop": an image that cannot be decoded raises; "skip": it becomes an `Unreadable`.
    """

    def __init__(
        self, root: str | os.PathLike[str], transform: v2.Transform, *, on_bad_image: Literal["stop", "skip"]
    ) -> None:
        self._folder = ImageFolder(os.fspath(root))
        self._transform, self._stops = transform, on_bad_image == "stop"

    def __len__(self) -> int:
        return len(self._folder.samples)

    def name(self, index: int) -> str:
        """The image's file, below `root`."""
        return Path(self._folder.samples[index][0]).relative_to(self._folder.root).as_posix()

    def __getitem__(self, index: int) -> tuple[Tensor, int] | Unreadable:
        path, label = self._folder.samples[index]
        image = read_or_stand_in(path, stops=self._stops, remedy="Fix or remove it")
        return image if isinstance(image, Unreadable) else (self._transform(image), label)
