"""Images in files: find, read and resize them."""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from polynl.errors import RunStoppedError, SettingsError, near_matches

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff"}
# It decodes a JPEG twice as fast as PIL, to the same pixels; PIL replaces it if torchvision drops it.
_decode_jpeg: Callable[..., Tensor] | None = getattr(torchvision.io, "decode_jpeg", None)
warnings.filterwarnings(
    "ignore", "The image decoding and encoding capabilities of TorchVision are deprecated"
)
# A small file can claim any size, which is checked before memory is allocated. This is PIL's own limit, here
# for all decoders; PIL warns of half as many pixels.
MOST_PIXELS = 178_956_970
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# Markers of a JPEG: segments that say how large it is, and markers that are no segments.
_JPEG_FRAMES = [bytes([kind]) for kind in range(0xC0, 0xD0) if kind not in (0xC4, 0xC8, 0xCC)]
_JPEG_BARE = [bytes([kind]) for kind in (0x01, *range(0xD0, 0xD9))]

# Detectors resize images by their longer side: the shorter side of a thinner image would vanish.
THINNEST = 50


@dataclass(frozen=True)
class Unreadable:
    """Stands in for an image that cannot be decoded."""

    path: str
    reason: str


class UnreadableImageError(RunStoppedError):
    """An image that cannot be decoded stops the run."""

    def __init__(self, message: str) -> None:
        # A DataLoader raises a worker's error again with the text of a traceback that ends with the message.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].rstrip())


def read_image(path: str | os.PathLike[str], *, upright: bool = False) -> Tensor:
    """A file as PIL's `convert("RGB")` has it, uint8, (3, h, w), or an UnreadableImageError that names it.

    `upright`: rotate it by its EXIF orientation, which data sets with annotations ignore.
    """
    try:
        return _decoded(Path(path).read_bytes(), upright=upright)
    except Exception as error:  # decoders raise anything for a broken file
        raise UnreadableImageError(f"{os.fspath(path)} is not a readable image: {_reason(error)}") from error


def image_size(path: Path) -> tuple[int, int]:
    """Width and height from the header of a file; an UnreadableImageError if it is turned by its EXIF data.

    Data sets with annotations ignore EXIF orientations, so boxes drawn on the upright image would be wrong.
    """
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1)
            size = image.size
    except Exception as error:  # decoders raise anything for a broken file
        raise UnreadableImageError(f"{path} is not a readable image: {_reason(error)}") from error
    if turned:
        raise UnreadableImageError(
            f"{path} is stored turned (EXIF orientation), which training ignores: save it upright, for "
            "example with `mogrify -auto-orient`"
        )
    return size


def read_for_detector(path: str | os.PathLike[str], *, upright: bool = False) -> Tensor:
    """As `read_image`; an image that is too thin for a detector counts as unreadable."""
    image = read_image(path, upright=upright)
    check_not_thin(image, os.fspath(path))
    return image


def check_not_thin(image: Tensor, name: str) -> None:
    """Raise an UnreadableImageError for an image (3, h, w) that is too thin for a detector."""
    height, width = image.shape[1:]
    if max(height, width) > THINNEST * min(height, width):
        raise UnreadableImageError(
            f"{name} is {width} wide and {height} high, more than {THINNEST} times as long as thin"
        )


def read_or_stand_in(
    path: str, *, stops: bool, remedy: str, read: Callable[[str], Tensor] = read_image
) -> Tensor | Unreadable:
    """The image that `read` returns; an unreadable one raises, with a remedy, or becomes an `Unreadable`."""
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
        size, scan = _jpeg_header(content)
        # Decoders fill up what is missing, such as the end of an interrupted download.
        if content.find(b"\xff\xd9", scan) < 0:
            raise ValueError("it starts as a JPEG and has no end")
        may_be_turned = upright and b"Exif" in content[:scan]
        if _decode_jpeg is not None and not may_be_turned and size is not None:
            _check_size(*size)
            try:
                return _decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode="RGB")
            except RuntimeError:
                pass  # PIL may read it, or has a better message
    with _opened(content) as image:
        _check_size(*image.size)
        return from_pil(image, upright=upright)


def from_pil(image: Image.Image, *, upright: bool) -> Tensor:
    """An image of PIL as `read_image` returns it."""
    if upright:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        return _from_16_bits(image)
    if "transparency" in image.info:
        # RGB cannot hold it, and PIL warns about palettes with it.
        image = image.copy()
        del image.info["transparency"]
    return v2.functional.pil_to_tensor(image.convert("RGB"))


def _from_16_bits(image: Image.Image) -> Tensor:
    """A grey image of 16 bits, which PIL would clip at 255."""
    values = v2.functional.pil_to_tensor(image).to(torch.float64)
    low, high = float(values.min()), float(values.max())
    if image.mode == "F" or low < 0 or high > 65535:
        raise ValueError(f"its values are from {low:g} to {high:g}, and only those of 8 or 16 bits are read")
    return (values / 257).round().to(torch.uint8).expand(3, -1, -1).contiguous()


def _opened(content: bytes) -> Image.Image:
    """The image, not decoded yet, whatever its size: PIL's own error does not say how large it is."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        return Image.open(io.BytesIO(content))
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"it is {width:,} × {height:,} pixels large, and at most {MOST_PIXELS:,} are read: scale it down"
        )


def _jpeg_header(jpeg: bytes) -> tuple[tuple[int, int] | None, int]:
    """Width and height, if they are there, and where the first scan begins.

    An end marker before the first scan is that of a thumbnail.
    """
    size, place = None, 2
    while jpeg[place : place + 1] == b"\xff" and (kind := jpeg[place + 1 : place + 2]) != b"\xda":
        if kind == b"\xff":  # any number of them may come before a segment
            place += 1
        elif kind in _JPEG_BARE:
            place += 2
        else:
            if kind in _JPEG_FRAMES and size is None:
                height, width = struct.unpack(">HH", jpeg[place + 5 : place + 9].ljust(4, b"\0"))
                size = width, height
            place += 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return size, place


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it has no known format"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return words.strip().partition("\n")[0] or type(error).__name__


def val_transform(
    size: int, resize: int, interpolation: InterpolationMode = InterpolationMode.BILINEAR
) -> v2.Transform:
    """Resize the shorter side to `resize`, then crop the centre."""
    return v2.Compose([v2.Resize(resize, interpolation, antialias=True), v2.CenterCrop(size)])


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and file.name[0] != "." and file.is_file()


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The image files that a command line names, and those in its folders."""
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if _is_image(file))
            if not inside:
                below = any(_is_image(file) for file in path.glob("*/*"))
                hint = (
                    f" Those below it are not looked for: name their folders, such as {path}/*."
                    if below
                    else ""
                )
                raise SettingsError(f"there is no image in the folder {path}.{hint}")
            images += inside
        elif path.is_file():
            images.append(path)
        else:
            there = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            raise SettingsError(f"there is no image {path}.{near_matches(path.name, there)}")
    return images


def names_apart(images: Sequence[Path]) -> list[str]:
    """A name for each image: its file's, with a number if another image has the same."""
    names: list[str] = []
    for image in images:
        name, number = image.stem, 1
        while name in names:
            number += 1
            name = f"{image.stem}_{number}"
        names.append(name)
    return names


def check_originals_stay(images: Sequence[Path], pictures: Iterable[Path]) -> None:
    """Raise a SettingsError if a picture would overwrite an image."""
    originals = {image.resolve() for image in images}
    for picture in pictures:
        if picture.resolve() in originals:
            raise SettingsError(f"--out: {picture} is one of the images; choose a folder for the pictures.")
