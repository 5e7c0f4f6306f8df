"""Images, and heat maps over them, as data URIs."""

from __future__ import annotations

import base64
import io

import matplotlib
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from polynl.explain.overlay import overlay, resized

# Its lightness rises steadily, so it is readable in print and by colour-blind readers.
COLOURS = "viridis"
# Pictures have at least and at most so many pixels per side; in smaller ones cells would be hard to see.
SIDE, LARGEST = 176, 440
# Images up to this size are stored exactly: JPEG would blur their edges.
SMALL = 96
Box = tuple[float, float, float, float]


def image_uri(image: Tensor, box: Box | None = None) -> str:
    """A uint8 image (3, h, w), with a box in pixels if there is one."""
    if box is None and max(image.shape[1:]) <= SMALL:
        return _encoded(image, image, None, exact=True)
    return _encoded(resized(image, _shown_size(image)), image, box)


def overlay_uri(image: Tensor, heat: Tensor, box: Box | None = None) -> str:
    """The image in grey with a map (h, w) from 0 to 1 over it, and the box."""
    return _encoded(overlay(image, heat, colours=COLOURS, size=_shown_size(image)), image, box)


def _shown_size(image: Tensor) -> tuple[int, int]:
    """Small images get every pixel repeated, large ones are downsampled."""
    height, width = image.shape[1:]
    longest = max(height, width)
    scale = LARGEST / longest if longest > LARGEST else max(1, -(-SIDE // longest))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _outlined(picture: Image.Image, image: Tensor, box: Box) -> None:
    """Draw a box, given in pixels of the image, in white on black."""
    across, down = picture.width / image.shape[2], picture.height / image.shape[1]
    left, right = (min(max(round(x * across), 0), picture.width - 1) for x in (box[0], box[2]))
    top, bottom = (min(max(round(y * down), 0), picture.height - 1) for y in (box[1], box[3]))
    drawing = ImageDraw.Draw(picture)
    drawing.rectangle((left, top, right, bottom), outline="black", width=4)
    if right - left > 2 and bottom - top > 2:
        drawing.rectangle((left + 1, top + 1, right - 1, bottom - 1), outline="white", width=2)


def _encoded(picture: Tensor, image: Tensor, box: Box | None, *, exact: bool = False) -> str:
    drawn = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    if box is not None:
        _outlined(drawn, image, box)
    file, kind = io.BytesIO(), "png" if exact else "jpeg"
    # Each format ignores the option of the other.
    drawn.save(file, kind, optimize=exact, quality=84)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def colour_bar() -> str:
    """The colours of `overlay` from low to high, as a CSS gradient."""
    stops = (matplotlib.colors.to_hex(matplotlib.colormaps[COLOURS](k / 8)) for k in range(9))
    return f"linear-gradient(to right, {', '.join(stops)})"


def stretched(values: Tensor, low: float | None = None) -> Tensor:
    """A map scaled to 0 (its minimum, or `low`) to 1; a constant map becomes 0."""
    values = values.nan_to_num(0.0, 0.0, 0.0)
    start = float(values.min()) if low is None else low
    span = float(values.max()) - start
    return (values - start) / span if span > 0 else torch.zeros_like(values)
