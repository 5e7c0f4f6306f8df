"""Folders of images, one a class, as ImageNet has them."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from polynl.errors import RunStoppedError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# It decodes a JPEG twice as fast as PIL, to the same pixels; where a later torchvision has dropped it, PIL
# does it all.
_decode_jpeg: Callable[..., Tensor] | None = getattr(torchvision.io, "decode_jpeg", None)
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities of TorchVision are deprecated"
)
# Large images are read; those that PIL takes for an attack, twice as large, are not.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


# Detectors resize images by their longer side: of a thinner one nothing would be left of the shorter.
THINNEST = 50


@dataclass(frozen=True)
class Unreadable:
    """What stands in for an image that cannot be decoded."""

    path: str
    reason: str


class UnreadableImageError(RunStoppedError):
    """An image that cannot be decoded, where that is to stop the run."""

    def __init__(self, message: str) -> None:
        # A DataLoader makes a worker's error anew, from the text of a traceback that ends with the message.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].rstrip())


def read_image(path: str | os.PathLike[str], *, upright: bool = False) -> Tensor:
    """A file as PIL's `convert("RGB")` has it, uint8, (3, h, w), or an UnreadableImageError that names it.

    `upright`: turned as the camera says that it was held, which data sets with annotations leave alone.
    """
    try:
        return _decoded(Path(path).read_bytes(), upright=upright)
    except Exception as error:  # decoders raise what they like about files that are none
        raise UnreadableImageError(f"{os.fspath(path)} is no readable image: {_reason(error)}") from error


def read_for_detector(path: str | os.PathLike[str], *, upright: bool = False) -> Tensor:
    """As `read_image`; an image too thin for a detector is as good as none."""
    image = read_image(path, upright=upright)
    height, width = image.shape[1:]
    if max(height, width) > THINNEST * min(height, width):
        raise UnreadableImageError(
            f"{os.fspath(path)} is {width} wide and {height} high, more than {THINNEST} times as long as thin"
        )
    return image


def read_or_stand_in(
    path: str, *, stops: bool, remedy: str, read: Callable[[str], Tensor] = read_image
) -> Tensor | Unreadable:
    """What `read` makes of a file; one that it cannot read raises, with a remedy, or is stood in for."""
    try:
        return read(path)
    except UnreadableImageError as error:
        if not stops:
            return Unreadable(path, str(error))
        raise UnreadableImageError(
            f"{error}\n{remedy}; --data.on-bad-image skip skips and counts such images."
        ) from None


def _decoded(content: bytes, *, upright: bool) -> Tensor:
    if not content:
        raise ValueError("the file is empty")
    if content.startswith(b"\xff\xd8"):
        # Decoders see to it that there is enough to decode, be it the zeros of a download that never ended.
        if not _has_end(content):
            raise ValueError("it begins as a JPEG and has no end")
        if _decode_jpeg is not None and not upright:
            try:
                return _decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode="RGB")
            except RuntimeError:
                pass  # PIL may know better, or knows better words for what is wrong
    with Image.open(io.BytesIO(content)) as image:
        # RGB has no room for it, and a palette with it makes PIL complain.
        image.info.pop("transparency", None)
        if upright:
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith(("I", "F")):
            return _from_16_bits(image)
        return v2.functional.pil_to_tensor(image.convert("RGB"))


def _from_16_bits(image: Image.Image) -> Tensor:
    """A grey image of 16 bits, which PIL would cut off at 255."""
    values = v2.functional.pil_to_tensor(image).to(torch.float64)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F" or low < 0 or high > 65535:
        raise ValueError(f"its values are from {low:g} to {high:g}, and only those of 8 or 16 bits are read")
    return (values / 257).round().to(torch.uint8).expand(3, -1, -1).contiguous()


def _has_end(jpeg: bytes) -> bool:
    """Whether the marker of the end comes after that of the first scan; earlier ones are a thumbnail's."""
    place = 2
    while jpeg[place : place + 1] == b"\xff" and (kind := jpeg[place + 1 : place + 2]) != b"\xda":
        # Any number of 0xff may come before a segment.
        place += 1 if kind == b"\xff" else 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return jpeg.find(b"\xff\xd9", place) >= 0


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it has no known format"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return words.strip().partition("\n")[0] or type(error).__name__


def train_transform(size: int, scale: tuple[float, float], flip: float) -> v2.Transform:
    """A crop of random size and shape, resized, mirrored with probability `flip`; uint8 stays uint8."""
    crop = v2.RandomResizedCrop(size, scale=scale, antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip(flip)])


def val_transform(
    size: int, resize: int, interpolation: InterpolationMode = InterpolationMode.BILINEAR
) -> v2.Transform:
    """The shorter side to `resize`, then the centre."""
    return v2.Compose([v2.Resize(resize, interpolation, antialias=True), v2.CenterCrop(size)])


class FolderImages(Dataset[Any]):
    """The images below `root`, one folder a class: (image as uint8, label).

    `on_bad_image` "stop": an image that cannot be decoded raises; "skip": an `Unreadable` stands in for it.
    """

    def __init__(
        self, root: str | os.PathLike[str], transform: v2.Transform, *, on_bad_image: Literal["stop", "skip"]
    ) -> None:
        self._folder = ImageFolder(os.fspath(root))
        self.classes: list[str] = self._folder.classes
        self._transform, self._stops = transform, on_bad_image == "stop"

    def __len__(self) -> int:
        return len(self._folder.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | Unreadable:
        path, label = self._folder.samples[index]
        image = read_or_stand_in(path, stops=self._stops, remedy="Mend or remove it")
        return image if isinstance(image, Unreadable) else (self._transform(image), label)
