"""Images and influence maps as a page holds them, compared with what they were made from."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import polynl
from polynl.explain import influence_map, influence_maps
from polynl.explain.networks import network_from_checkpoint
from polynl.models.resnet import SmallResNet
from polynl.report.images import LARGEST, SIDE, SMALL, colour_bar, image_uri, overlay_uri, stretched
from polynl.report.influence import CELLS, STEPS, cell_maps, coarser, packed


def pixels(uri: str) -> np.ndarray:
    kind, _, content = uri.partition(";base64,")
    picture = Image.open(io.BytesIO(base64.b64decode(content)))
    assert kind == f"data:image/{(picture.format or '').lower()}"
    return np.asarray(picture).astype(int)


def noise(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_a_small_image_is_kept_exactly() -> None:
    image = noise(3, 20, SMALL)
    assert (pixels(image_uri(image)) == image.permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize(
    ("size", "expected"),
    [((300, 200), (300, 200)), ((1000, 500), (LARGEST, LARGEST // 2)), ((5000, 3), (LARGEST, 1))],
)
def test_a_large_image_is_reduced(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = torch.full((3, *size), 100, dtype=torch.uint8)
    found = pixels(image_uri(image))
    assert found.shape[:2] == expected
    assert np.abs(found - 100).max() <= 2


def test_an_overlay_shows_the_map_over_the_image() -> None:
    """Upper half 0, lower half 1: 0.6 times the ends of viridis over black, and lighter over white."""
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    image[:, :, 30:] = 255
    heat = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    found = pixels(overlay_uri(image, heat))
    assert max(found.shape) >= SIDE
    height, width = found.shape[:2]
    for row, value in ((2, 0.0), (height - 3, 1.0)):
        colour = 0.6 * 255 * np.array(matplotlib.colormaps["viridis"](value)[:3])
        assert np.abs(found[row, 5] - colour).max() < 10
        assert np.abs(found[row, width - 5] - (colour + 0.4 * 255)).max() < 10


def test_a_box_is_where_it_was_found() -> None:
    """On an image of 50 × 100 that is drawn twice as large: white edges with black ones around them."""
    image = torch.full((3, 50, 100), 128, dtype=torch.uint8)
    found = pixels(image_uri(image, (10.0, 20.0, 60.0, 40.0))).mean(axis=-1)
    assert found.shape == (100, 200)
    white = np.argwhere(found > 225)
    # JPEG smears by a pixel or two.
    assert white.min(axis=0) == pytest.approx([41, 21], abs=2)
    assert white.max(axis=0) == pytest.approx([79, 119], abs=2)
    assert found[60, 70] == pytest.approx(128, abs=3), "the inside"
    assert found[40, 60] < 100


def test_a_box_beyond_the_image_has_its_edges_at_the_border() -> None:
    image = torch.full((3, 50, 100), 128, dtype=torch.uint8)
    found = pixels(image_uri(image, (-5.0, -9.0, 500.0, 700.0))).mean(axis=-1)
    for edge in (found[:4, 100], found[-4:, 100], found[50, :4], found[50, -4:]):
        assert edge.max() > 200


@pytest.mark.parametrize("box", [(3.0, 3.0, 3.2, 3.2), (99.9, 49.9, 100.0, 50.0)])
def test_the_smallest_box_can_be_drawn(box: tuple[float, float, float, float]) -> None:
    image = torch.full((3, 50, 100), 128, dtype=torch.uint8)
    assert (np.abs(pixels(image_uri(image, box)) - 128) > 50).any()


def test_the_colour_bar_has_the_colours_of_the_map() -> None:
    assert colour_bar().startswith("linear-gradient(to right, #440154,")
    assert colour_bar().endswith("#fde725)")


def test_maps_are_stretched() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert stretched(values).tolist() == [[0.0, 0.25], [0.5, 1.0]]
    assert stretched(values, low=0.0).flatten().tolist() == pytest.approx([0.2, 0.4, 0.6, 1.0])
    assert not stretched(torch.full((2, 2), 3.0)).any()
    assert stretched(torch.tensor([[0.0, torch.nan, 2.0]])).tolist() == [[0.0, 0.0, 1.0]]


def unpacked(maps: dict[str, Any]) -> Tensor:
    steps = torch.frombuffer(bytearray(base64.b64decode(maps["shares"])), dtype=torch.int8)
    scales = torch.tensor(maps["scales"]).view(*maps["grid"], 1, 1)
    return steps.view(*maps["grid"], *maps["sources"]) / STEPS * scales


def test_packed_shares_are_the_maps_within_half_a_step() -> None:
    maps = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    found = packed(maps)
    assert (found["grid"], found["sources"]) == ((3, 4), (5, 6))
    largest = maps.abs().amax((2, 3))
    assert torch.tensor(found["scales"]) == pytest.approx(largest.flatten().numpy(), rel=1e-3)
    assert (
        (unpacked(found) - maps).abs() <= 0.51 / STEPS * largest[..., None, None] + 1e-3 * maps.abs()
    ).all()
    assert list(found) == ["grid", "sources", "scales", "shares"], "as the page reads it"


def test_a_map_of_nothing_is_packed_as_nothing() -> None:
    maps = torch.zeros(1, 2, 2, 2)
    maps[0, 1] = torch.nan
    found = packed(maps)
    assert found["scales"] == [0.0, 0.0]
    assert not unpacked(found).any()


@pytest.mark.parametrize("shape", [(16, 16), (17, 40), (33, 5), (100, 3)])
def test_coarser_maps_keep_their_sum(shape: tuple[int, int]) -> None:
    shares = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = coarser(shares)
    assert max(found.shape) <= CELLS
    assert float(found.sum()) == pytest.approx(float(shares.sum()), rel=1e-12)
    rows, columns = (-(-size // CELLS) for size in shape)
    assert float(found[0, 0]) == pytest.approx(float(shares[:rows, :columns].sum()), rel=1e-12)


def network(side: int) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    model = polynl.insert(SmallResNet(depth=1, width=4), "poly_nl", before="layer3.0")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().double(), torch.rand(1, 3, side, side + 8, dtype=torch.float64)


def test_cells_are_positions_where_these_are_few() -> None:
    model, image = network(24)
    found = cell_maps(model, image, "layer3.0.polynl_before")
    assert torch.allclose(found, influence_maps(model, image[0]), atol=1e-12)
    assert torch.allclose(found.sum((2, 3)), torch.ones(found.shape[:2], dtype=torch.float64))


def test_cells_of_a_large_map_are_some_positions_together() -> None:
    """The share of the mean of two rows, as `influence` itself has it."""
    model, image = network(72)
    block = "layer3.0.polynl_before"
    found = cell_maps(model, image, block)
    positions = influence_maps(model, image[0]).shape
    assert positions[:2] == (18, 20)
    assert found.shape == (9, 10, 9, 10)
    assert torch.allclose(found.sum((2, 3)), torch.ones(9, 10, dtype=torch.float64))
    seen: list[Tensor] = []
    module = model.get_submodule(block)
    module.register_forward_hook(lambda _, args, output: seen.append(args[0]))
    model(image)
    place = torch.zeros(1, 18, 20, dtype=torch.float64)
    place[0, 4:6, 6:8] = 0.25
    expected = polynl.explain.influence(module, seen[0].detach(), place)[0]
    assert torch.allclose(found[2, 3], coarser(expected), rtol=0, atol=1e-12)
    alone = polynl.explain.influence(module, seen[0].detach(), (4, 6))[0]
    assert not torch.allclose(coarser(alone), coarser(expected), rtol=0, atol=1e-6), "one would do as well"


def test_the_padding_of_a_detector_is_cut_off(detector: Path) -> None:
    """Of 24 × 24 positions 20 × 20 are in the image: a cell of 2 × 2 is a box of 6.4 pixels a side."""
    subject = network_from_checkpoint(detector / "last.safetensors")
    assert subject.block is not None
    image = subject.inputs(noise(3, 64, 64))
    found = cell_maps(subject.model, image, subject.block)
    assert found.shape == (10, 10, 10, 10)
    (expected,) = influence_map(subject.model, image, (19.3, 12.9, 25.5, 19.1))
    assert expected.shape == (20, 20)
    assert torch.allclose(found[2, 3], coarser(expected), atol=1e-5)
