"""Heat maps over images, pixel by pixel."""

from __future__ import annotations

import matplotlib
import pytest
import torch
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

from polynl.explain.overlay import overlay, resized

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
IMAGE = torch.tensor([[RED, GREEN, BLUE], [WHITE, BLACK, RED]], dtype=torch.uint8).permute(2, 0, 1)
# Of the pixels, from 0 to 1.
GREY = torch.tensor([[0.299, 0.587, 0.114], [1.0, 0.0, 0.299]])


def colour(level: float, name: str = "viridis") -> Tensor:
    return torch.tensor(matplotlib.colormaps[name](level)[:3])[:, None, None]


def assert_pixels(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.uint8
    torch.testing.assert_close(found.double(), 255 * expected.double(), atol=0.51, rtol=0)


@pytest.mark.parametrize("level", [0.0, 0.25, 1.0])
def test_a_constant_map_is_one_colour_over_the_image_in_grey(level: float) -> None:
    found = overlay(IMAGE, torch.full((4, 5), level))
    assert_pixels(found, 0.4 * GREY + 0.6 * colour(level))


def test_opacity_colours_and_a_lighter_image() -> None:
    found = overlay(IMAGE, torch.zeros(1, 1), colours="inferno", opacity=0.7, lighten=0.5)
    assert_pixels(found, 0.3 * (0.5 * GREY + 0.5) + 0.7 * colour(0.0, "inferno"))
    assert_pixels(overlay(IMAGE, torch.zeros(1, 1), opacity=0.0), GREY.expand(3, 2, 3))


def test_limits_are_the_ends_of_the_colours() -> None:
    values = torch.tensor([[-9.0, -3.0, 0.0], [2.0, 5.0, 50.0]])
    found = overlay(IMAGE, values, limits=(-3.0, 5.0), nearest=True)
    levels = torch.tensor([[0.0, 0.0, 3 / 8], [5 / 8, 1.0, 1.0]])
    colours = torch.cat([colour(float(level)) for level in levels.flatten()], dim=2).reshape(3, 2, 3)
    assert_pixels(found, 0.4 * GREY + 0.6 * colours)


def test_a_map_of_one_value_has_the_lowest_colour() -> None:
    """Its limits are the same."""
    assert torch.equal(overlay(IMAGE, torch.ones(2, 2), limits=(1.0, 1.0)), overlay(IMAGE, torch.zeros(2, 2)))


def test_what_is_not_a_number_is_transparent() -> None:
    values = torch.tensor([[torch.nan, 0.0, 0.0]])
    found = overlay(IMAGE, values, nearest=True)
    assert_pixels(found[:, :, :1], GREY[:, :1].expand(3, 2, 1))
    assert_pixels(found[:, :, 1:], 0.4 * GREY[:, 1:] + 0.6 * colour(0.0))


def test_cells_are_shown_or_interpolated() -> None:
    ramp = LinearSegmentedColormap.from_list("ramp", ["#000000", "#FFFFFF"], N=4096)
    image = torch.zeros(3, 1, 8, dtype=torch.uint8)
    values = torch.tensor([[0.0, 1.0]])
    cells = overlay(image, values, colours=ramp, opacity=1.0, nearest=True)
    assert cells[0, 0].tolist() == [0] * 4 + [255] * 4
    smooth = overlay(image, values, colours=ramp, opacity=1.0)
    # The centers of the cells are in the middle of the halves.
    expected = torch.tensor([0, 0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1, 1])
    assert_pixels(smooth, expected.expand(3, 1, 8))


def test_the_size_of_the_result() -> None:
    found = overlay(IMAGE, torch.zeros(1, 1), size=(4, 9))
    larger = GREY.repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert_pixels(found, 0.4 * larger + 0.6 * colour(0.0))


def test_images_are_enlarged_by_repeating_pixels_and_reduced_by_averaging() -> None:
    assert torch.equal(resized(IMAGE, (4, 9)), IMAGE.repeat_interleave(2, 1).repeat_interleave(3, 2))
    assert torch.equal(resized(IMAGE, (2, 3)), IMAGE)
    large = torch.full((3, 40, 60), 200, dtype=torch.uint8)
    large[:, :20] = 100
    small = resized(large, (4, 6))
    assert small.shape == (3, 4, 6)
    assert (small[:, 0] == 100).all()
    assert (small[:, 3] == 200).all()
