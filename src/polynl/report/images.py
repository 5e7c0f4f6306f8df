"""Images and maps over them, as data that a page holds itself."""

from __future__ import annotations

import base64
import io

import matplotlib
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

# Colour-blind readers see its order too, and it rises in lightness, so that a print keeps it.
COLOURS = "viridis"
# Pictures are at least so large, or cells of maps could not be told apart, and at most so, in pixels a side.
SIDE, LARGEST = 176, 440
# Smaller images are kept exactly: JPEG blurs what is drawn with sharp edges.
SMALL = 96
Box = tuple[float, float, float, float]


def data_uri(content: bytes, kind: str) -> str:
    """What a page writes in place of an address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_uri(image: Tensor, box: Box | None = None) -> str:
    """A uint8 image (3, h, w), with a box in its pixels if one is given."""
    if box is None and max(image.shape[1:]) <= SMALL:
        return _encoded(image, image, None, exact=True)
    return _encoded(_sized(image), image, box)


def overlay_uri(image: Tensor, heat: Tensor, box: Box | None = None) -> str:
    """The image in grey with a map (h, w) from 0 to 1 over it, and the box."""
    large = _sized(image).float() / 255
    grey = (large * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0, keepdim=True)
    smooth = F.interpolate(heat[None, None].float(), large.shape[1:], mode="bilinear", align_corners=False)
    colours = torch.from_numpy(matplotlib.colormaps[COLOURS](smooth[0, 0].clamp(0, 1).numpy())[..., :3])
    mixed = 0.4 * grey + 0.6 * colours.permute(2, 0, 1).float()
    return _encoded((mixed * 255).round().to(torch.uint8), image, box)


def _sized(image: Tensor) -> Tensor:
    """Small images with every pixel repeated, large ones reduced."""
    longest = max(image.shape[1:])
    if longest > LARGEST:
        size = [max(1, round(side * LARGEST / longest)) for side in image.shape[1:]]
        smaller = F.interpolate(image[None].float(), size, mode="bilinear", antialias=True)
        return smaller[0].round().clamp(0, 255).to(torch.uint8)
    scale = max(1, -(-SIDE // longest))
    return image.repeat_interleave(scale, 1).repeat_interleave(scale, 2)


def _outlined(picture: Image.Image, image: Tensor, box: Box) -> None:
    """Draw a box that is given in pixels of the image: white on black, to be seen on everything."""
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
    file = io.BytesIO()
    if exact:
        drawn.save(file, "PNG", optimize=True)
    else:
        drawn.save(file, "JPEG", quality=84)
    return data_uri(file.getvalue(), "image/png" if exact else "image/jpeg")


def colour_bar() -> str:
    """The colours of `overlay_uri` from low to high, as CSS has a gradient."""
    stops = (matplotlib.colors.to_hex(matplotlib.colormaps[COLOURS](k / 8)) for k in range(9))
    return f"linear-gradient(to right, {', '.join(stops)})"


def stretched(values: Tensor, low: float | None = None) -> Tensor:
    """A map from 0, where it is lowest or `low`, to 1; all 0 where it is the same everywhere."""
    values = values.nan_to_num(0.0, 0.0, 0.0)
    start = float(values.min()) if low is None else low
    span = float(values.max()) - start
    return (values - start) / span if span > 0 else torch.zeros_like(values)
