"""Figures against their definitions in plain complex numbers, and the coverage of pixels at their edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polynl.data.shapes import SHAPES, coverage

# Whether a point u + iv, v down, lies inside: written from the drawing, not from distances.
INSIDE: dict[str, Callable[[complex], bool]] = {
    "disc": lambda z: abs(z) < 0.95,
    "diamond": lambda z: abs(z.real) + abs(z.imag) < 0.95,
    "triangle": lambda z: all(
        # Equilateral, apex up: left of each of its sides, which are 0.46, 0.46 and 0.7 from the centre.
        (z * complex(math.cos(turn), math.sin(turn))).imag < far
        for turn, far in ((0.0, 0.7), (math.radians(120), 0.46), (math.radians(-120), 0.46))
    ),
    "plus": lambda z: min(abs(z.real), abs(z.imag)) < 0.32 and max(abs(z.real), abs(z.imag)) < 0.95,
    "ring": lambda z: 0.45 < abs(z) < 0.95,
    "bar": lambda z: abs(z.real) < 0.95 and abs(z.imag) < 0.34,
    "square": lambda z: max(abs(z.real), abs(z.imag)) < 0.8,
}


def one(size: int, shape: str, x: float, y: float, radius: float, angle: float) -> Tensor:
    number = list(SHAPES).index(shape)
    item = (torch.tensor(number), torch.tensor([x, y]), torch.tensor(radius), torch.tensor(angle))
    return coverage(size, *item)


@pytest.mark.parametrize("angle", [0.0, 0.3, -2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_a_pixel_is_covered_where_its_centre_is_inside(shape: str, angle: float) -> None:
    size, x, y, radius = 41, 0.53, 0.44, 0.38
    covered = one(size, shape, x, y, radius, angle)
    turned_back = complex(math.cos(angle), -math.sin(angle))
    # Centres on the very edge may differ; the triangle writes cos 30° to three digits.
    slack = 1e-3 if shape == "triangle" else 1e-4
    for row in range(size):
        for column in range(size):
            z = complex((column + 0.5) / size - x, (row + 0.5) / size - y) * turned_back / radius
            value = covered[row, column].item()
            assert (value >= 0.5) == INSIDE[shape](z) or abs(value - 0.5) < slack, (row, column)


def test_an_edge_covers_its_share_of_a_pixel() -> None:
    # A square from 1.6 to 6.4 pixels, on 8: the pixels at its edge are covered by 0.4.
    covered = one(8, "square", 0.5, 0.5, 2.4 / 8 / 0.8, 0.0)
    middle = covered[4]
    torch.testing.assert_close(middle, torch.tensor([0, 0.4, 1, 1, 1, 1, 0.4, 0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(covered, covered.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_figure_fits_its_square(shape: str) -> None:
    edge = torch.linspace(-1, 1, 401)
    border = torch.full_like(edge, 1.0)
    for u, v in ((edge, border), (edge, -border), (border, edge), (-border, edge)):
        assert (SHAPES[shape](u, v) > 0).all()
    assert (SHAPES[shape](torch.tensor(0.6), torch.tensor(0.2)) < 0) == INSIDE[shape](0.6 + 0.2j)


def test_figures_of_a_batch_are_drawn_each_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(len(SHAPES), (3, 4), generator=generator)
    centres, radii = (torch.rand(3, 4, *more, generator=generator) for more in ((2,), ()))
    angles = torch.rand(3, 4, generator=generator) * 6
    together = coverage(17, shapes, centres, radii, angles)
    assert together.shape == (3, 4, 17, 17)
    assert together.min() >= 0
    assert together.max() <= 1
    names = list(SHAPES)
    for n in range(3):
        for k in range(4):
            alone = one(
                17, names[shapes[n, k]], *centres[n, k].tolist(), radii[n, k].item(), angles[n, k].item()
            )
            assert torch.equal(together[n, k], alone)
