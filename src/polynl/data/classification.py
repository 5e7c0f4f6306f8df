"""Folders of images, one a class, as ImageNet has them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import io
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# It decodes a JPEG twice as fast as PIL; where a later torchvision has dropped it, PIL does it all.
_decode_jpeg: Callable[..., Tensor] | None = getattr(io, "decode_jpeg", None)
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities of TorchVision are deprecated"
)


@dataclass(frozen=True)
class Unreadable:
    """What stands in for an image that cannot be decoded."""

    path: str
    reason: str


class UnreadableImageError(ValueError):
    """An image that cannot be decoded, where that is to stop the run."""


def read_image(path: str | os.PathLike[str]) -> Tensor:
    """An image file as RGB, uint8, (3, h, w); an UnreadableImageError names the file."""
    try:
        content = Path(path).read_bytes()
        return _decoded(content)
    except (OSError, RuntimeError, ValueError, SyntaxError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UnreadableImageError(f"{os.fspath(path)} is no readable image: {reason}") from error


def _decoded(content: bytes) -> Tensor:
    # A JPEG ends with its end-of-image marker; what is cut short is left to PIL, which says so, where
    # libjpeg would fill the rest with grey.
    if _decode_jpeg is not None and content[:2] == b"\xff\xd8" and b"\xff\xd9" in content[-64:]:
        try:
            return _decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode="RGB")
        except RuntimeError:  # four colours, among others
            pass
    return _decoded_by_pil(content)


def _decoded_by_pil(content: bytes) -> Tensor:
    import io as stdio

    from PIL import Image

    if not content:
        raise ValueError("the file is empty")
    with Image.open(stdio.BytesIO(content)) as image:
        return v2.functional.pil_to_tensor(image.convert("RGB"))


def train_transform(size: int, scale: tuple[float, float], flip: float) -> v2.Transform:
    """A crop of random size and shape, resized, mirrored with probability `flip`; uint8 stays uint8."""
    crop = v2.RandomResizedCrop(size, scale=scale, antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip(flip)])


def val_transform(size: int, resize: int) -> v2.Transform:
    """The shorter side to `resize`, then the centre."""
    return v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size)])


class FolderImages(Dataset[Any]):
    """The images below `root`, one folder a class: (image as uint8, label).

    `on_bad_image` "stop": an image that cannot be decoded raises; "skip": an `Unreadable` stands in for it.
    """

    def __init__(self, root: str | os.PathLike[str], transform: v2.Transform, *, on_bad_image: str) -> None:
        self._folder = ImageFolder(os.fspath(root))
        self.classes: list[str] = self._folder.classes
        self._transform, self._stops = transform, on_bad_image == "stop"

    def __len__(self) -> int:
        return len(self._folder.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | Unreadable:
        path, label = self._folder.samples[index]
        try:
            return self._transform(read_image(path)), label
        except UnreadableImageError as error:
            if self._stops:
                raise
            return Unreadable(path, str(error))
