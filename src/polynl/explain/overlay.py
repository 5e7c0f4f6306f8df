"""Heat maps over images."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.colors import Colormap, Normalize
from torch import Tensor

# Weights of red, green and blue in the grey level of an image (ITU-R BT.601).
LUMA = (0.299, 0.587, 0.114)


def overlay(
    image: Tensor,
    values: Tensor,
    *,
    colours: str | Colormap = "viridis",
    limits: tuple[float, float] = (0.0, 1.0),
    opacity: float = 0.6,
    lighten: float = 0.0,
    nearest: bool = False,
    size: Sequence[int] | None = None,
) -> Tensor:
    """A map (h', w') in colours over a uint8 image (3, h, w) in grey: uint8 (3, *size).

    `colours`, `limits`: a matplotlib colour map, and the values of its first and last colour; values that are
    not a number stay transparent.
    `lighten`: from 0 (the image as it is) to 1 (white).
    `nearest`: show the map's cells instead of interpolating between them.
    `size`: height and width of the result (default: those of the image).
    """
    size = image.shape[1:] if size is None else size
    pixels = resized(image, size).float() / 255
    grey = (pixels * torch.tensor(LUMA)[:, None, None]).sum(dim=0)
    grey = grey + lighten * (1 - grey)
    mode = {"mode": "nearest-exact"} if nearest else {"mode": "bilinear", "align_corners": False}
    scaled = F.interpolate(values[None, None].float().cpu(), tuple(size), **mode)[0, 0]
    rgba = matplotlib.colormaps.get_cmap(colours)(Normalize(*limits)(scaled.numpy()))
    *rgb, alpha = torch.from_numpy(rgba).float().unbind(-1)
    mixed = grey + opacity * alpha * (torch.stack(rgb) - grey)
    return (mixed * 255).round().to(torch.uint8)


def resized(image: Tensor, size: Sequence[int]) -> Tensor:
    """A uint8 image (3, h, w) of another size: pixels are repeated to enlarge it, averaged to reduce it."""
    height, width = size
    if (height, width) == image.shape[1:]:
        return image.cpu()
    pixels = image[None].float().cpu()
    if height >= image.shape[1] and width >= image.shape[2]:
        larger = F.interpolate(pixels, (height, width), mode="nearest-exact")
        return larger[0].to(torch.uint8)
    smaller = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    return smaller[0].round().clamp(0, 255).to(torch.uint8)
