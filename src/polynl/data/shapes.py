"""Plane figures as signed distances: drawn at any size, with smooth edges and exact masks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Distance to the figure's edge, negative inside, in units of its radius; it fits the square [-1, 1]², v down.
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda u, v: torch.hypot(u, v) - 0.95,
    "diamond": lambda u, v: (u.abs() + v.abs() - 0.95) / 2**0.5,
    "triangle": lambda u, v: torch.maximum(v - 0.7, 0.866 * u.abs() - 0.5 * v - 0.46),
    "plus": lambda u, v: torch.minimum(_rectangle(u, v, 0.95, 0.32), _rectangle(u, v, 0.32, 0.95)),
    "ring": lambda u, v: (torch.hypot(u, v) - 0.7).abs() - 0.25,
    "bar": lambda u, v: _rectangle(u, v, 0.95, 0.34),
    "square": lambda u, v: _rectangle(u, v, 0.8, 0.8),
}


def coverage(size: int, shapes: Tensor, centres: Tensor, radii: Tensor, angles: Tensor) -> Tensor:
    """How much of every pixel each figure covers, in [0, 1]: (…, size, size) for figures of shape (…).

    Centres (x, y) and radii are fractions of the image's side, angles are in radians.
    """
    pixel = (torch.arange(size, dtype=torch.float32) + 0.5) / size
    flat = shapes.flatten()
    covered = torch.empty(flat.numel(), size, size)
    x, y = centres.reshape(-1, 2).unbind(-1)
    radius, angle = radii.flatten(), angles.flatten()
    for number, distance in enumerate(SHAPES.values()):
        (chosen,) = torch.where(flat == number)
        right = (pixel - x[chosen, None])[:, None, :]
        down = (pixel - y[chosen, None])[:, :, None]
        cos, sin = (f(angle[chosen])[:, None, None] for f in (torch.cos, torch.sin))
        r = radius[chosen][:, None, None]
        edge = distance((cos * right + sin * down) / r, (cos * down - sin * right) / r)
        covered[chosen] = (0.5 - edge * r * size).clamp_(0, 1)
    return covered.reshape(*shapes.shape, size, size)


def _rectangle(u: Tensor, v: Tensor, half_width: float, half_height: float) -> Tensor:
    return torch.maximum(u.abs() - half_width, v.abs() - half_height)
