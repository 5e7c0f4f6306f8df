"""Influence maps of blocks in networks: shares, and the cells of points and boxes of an image."""

from typing import Any

import pytest
import torch
from literal_parts import assert_close, literal
from tiny_networks import (
    PADDED,
    activation_by_hand,
    classifier,
    faces,
    images,
    masks,
    untouched,
    with_random_blocks,
)
from torch import Tensor, nn
from torchvision.models import get_model

import polynl
from polynl.explain import influence, influence_map, influence_maps

BLOCK = "conv.polynl_before"
KINDS = [
    ("poly_nl", {}),
    ("non_local", {}),
    ("non_local", {"mode": "embedded_gaussian", "norm": "batch"}),
    ("efficient_nl", {"heads": 2}),
]
every_kind = pytest.mark.parametrize(("name", "options"), KINDS, ids=str)


def shares_by_hand(model: nn.Module, given: Any, cells: list[list[tuple[int, int]]]) -> list[Tensor]:
    """Of every image those in the mean over its cells, from the parts of all pairs of positions."""
    x, _ = activation_by_hand(model, given, BLOCK)
    parts, _ = literal(model.get_submodule(BLOCK), x)
    found = []
    for sample, wanted in zip(parts, cells, strict=True):
        rows = [row * x.shape[-1] + column for row, column in wanted]
        mean = sample[rows].mean(dim=0)
        y = mean.sum(dim=0)
        found.append(((mean @ y) / (y @ y)).reshape(x.shape[-2:]))
    return found


def small(name: str, **options: Any) -> nn.Module:
    """In fp64, with maps of 3×4 for images of 6×8."""
    return classifier(name, **options).double().train()


def two() -> Tensor:
    return torch.stack(images((6, 8), (6, 8), dtype=torch.float64))


@every_kind
@pytest.mark.parametrize(("spot", "cell"), [((0, 0), (0, 0)), ((3, 5), (2, 1)), ((7.9, 2), (1, 3))], ids=str)
def test_a_point_is_in_a_cell(
    name: str, options: dict[str, Any], spot: tuple[float, float], cell: tuple[int, int]
) -> None:
    model = small(name, **options)
    with untouched(model):
        shares = influence_map(model, two(), spot)
    assert_close(shares, torch.stack(shares_by_hand(model, two(), [[cell], [cell]])), 1e-11)
    assert_close(shares.sum(dim=(1, 2)), torch.ones(2), 1e-11)
    assert not shares.requires_grad


@every_kind
def test_a_box_is_the_mean_over_its_cells(name: str, options: dict[str, Any]) -> None:
    model = small(name, **options)
    shares = influence_map(model, two(), (3, 2, 6, 5))
    cells = [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert_close(shares, torch.stack(shares_by_hand(model, two(), [cells, cells])), 1e-11)


def test_a_box_of_a_cell_is_its_point() -> None:
    model = small("poly_nl")
    assert torch.equal(influence_map(model, two(), (2, 4, 4, 6)), influence_map(model, two(), (3, 5)))


def test_spots_may_be_tensors() -> None:
    model = with_random_blocks(masks())
    given = images(*PADDED)
    boxes = torch.tensor([[2.0, 3.0, 9.0, 8.0]] * len(given))
    expected = influence_map(model, given, (2.0, 3.0, 9.0, 8.0))
    for spot in (boxes, boxes[0], list(boxes)):
        for found, one in zip(influence_map(model, given, spot), expected, strict=True):
            assert torch.equal(found, one)


def test_each_image_may_have_a_spot_of_its_own() -> None:
    model = small("poly_nl")
    expected = torch.stack(shares_by_hand(model, two(), [[(2, 1)], [(0, 0), (0, 1), (0, 2), (0, 3)]]))
    for spots in ([(3, 5), (-9, -9, 99, 1)], ((3, 5), [0, 0, 8, 2])):
        assert_close(influence_map(model, two(), spots), expected, 1e-11)


def test_an_image_has_a_map_and_a_list_has_a_list() -> None:
    model = small("poly_nl")
    expected = influence_map(model, two(), (3, 5))
    listed = influence_map(model, list(two()), [3, 5])
    assert isinstance(listed, list)
    assert_close(torch.stack(listed), expected, 1e-12)
    assert_close(influence_map(model, two()[1], (3, 5)), expected[1], 1e-12)
    assert_close(influence_map(model, two()[1], [(3, 5)]), expected[1], 1e-12)


def test_sub_sampled_keys_have_a_smaller_map() -> None:
    model = small("non_local", mode="embedded_gaussian", sub_sample="after")
    x, _ = activation_by_hand(model, two(), BLOCK)
    shares = influence_map(model, two(), (7, 5))
    assert shares.shape == (2, 1, 2)
    assert torch.equal(shares, influence(model.conv.polynl_before, x, (2, 3)))


def test_the_default_block_is_the_first() -> None:
    model = polynl.insert(small("poly_nl"), "non_local", after="stem", channels=4, init="random")
    x, _ = activation_by_hand(model, two(), BLOCK)
    second = influence(model.conv.polynl_before, x, (2, 1))
    assert torch.equal(influence_map(model, two(), (3, 5), block="conv"), second)
    assert torch.equal(influence_map(model, two(), (3, 5), block=BLOCK), second)
    x, _ = activation_by_hand(model, two(), "stem.polynl_after")
    assert torch.equal(influence_map(model, two(), (3, 5)), influence(model.stem.polynl_after, x, (2, 1)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_kind
def test_works_where_gradients_are_off(name: str, options: dict[str, Any], mode: Any) -> None:
    model = small(name, **options)
    expected = influence_map(model, two(), (3, 5))
    with mode():
        assert_close(influence_map(model, two(), (3, 5)), expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_networks_in_half_precision_have_maps_in_fp32(dtype: torch.dtype) -> None:
    model = classifier("poly_nl").to(dtype)
    shares = influence_map(model, two().to(dtype), (0, 0, 6, 2))
    assert shares.dtype == torch.float32
    assert_close(shares.sum(dim=(1, 2)), torch.ones(2), 1e-5)


# Detectors and clips


def test_maps_of_a_detector_are_without_the_padding() -> None:
    model, given = with_random_blocks(masks()).train(), images(*PADDED)
    name = "backbone.body.layer3.1.polynl_before"
    x, _ = activation_by_hand(model, given, name)
    assert x.shape[-2:] == (4, 4)
    with untouched(model):
        one, other = influence_map(model, given, [(31, 63), (0, 0, 64, 40)])
    places = torch.zeros(2, 4, 4)
    places[0, 3, 1] = 1
    places[1, :3, :] = 1 / 12
    inside = torch.zeros(2, 4, 4, dtype=torch.bool)
    inside[0, :, :2] = inside[1, :3] = True
    expected = influence(model.get_submodule(name), x, places, mask=inside)
    assert_close(one, expected[0, :, :2], 1e-6)
    assert_close(other, expected[1, :3], 1e-6)
    # Two in a batch are of one size, and so is one alone.
    assert influence_map(model, torch.stack([given[1]] * 2), (0, 0)).shape == (2, 3, 4)
    assert influence_map(model, given[0], (0, 0)).shape == (4, 2)


def test_points_are_pixels_of_the_image_before_it_is_resized() -> None:
    model, given = with_random_blocks(faces()), images(*PADDED)
    name = "backbone.body.layer3.1.polynl_before"
    x, _ = activation_by_hand(model, given, name)
    assert x.shape[-2:] == (8, 8)
    places = torch.zeros(2, 8, 8)
    places[0, 5, 2] = places[1, 3, 5] = 1
    inside = torch.zeros(2, 8, 8, dtype=torch.bool)
    inside[0, :6, :3] = inside[1, :4, :6] = True
    one, other = influence_map(model, given, [(31, 63), (63, 39)])
    expected = influence(model.get_submodule(name), x, places, mask=inside)
    assert_close(one, expected[0, :6, :3], 1e-6)
    assert_close(other, expected[1, :4, :6], 1e-6)


def test_clips_have_maps_over_time_of_a_spot_at_all_times() -> None:
    model = polynl.insert(get_model("r3d_18"), "poly_nl", before="layer3.1", channels=256, init="random")
    batch = torch.rand(1, 3, 8, 32, 48, generator=torch.Generator().manual_seed(1))
    x, _ = activation_by_hand(model, batch, "layer3.1.polynl_before")
    places = torch.zeros(1, 2, 4, 6)
    places[0, :, 1, 2:4] = 1 / 4
    shares = influence_map(model, batch, (16, 8, 32, 16))
    assert_close(shares, influence(model.layer3[1].polynl_before, x, places), 1e-6)
    assert_close(shares.sum(), torch.ones(()), 1e-5)


# All positions


@every_kind
def test_all_maps_are_those_of_each_position(name: str, options: dict[str, Any]) -> None:
    model, image = small(name, **options), two()[1]
    with untouched(model):
        maps = influence_maps(model, image)
    assert maps.shape == (3, 4, 3, 4)
    for row in range(3):
        for column in range(4):
            spot = (2 * column + 1, 2 * row + 1)
            assert_close(maps[row, column], influence_map(model, image, spot), 1e-12)


def test_all_maps_of_a_chosen_block_with_fewer_keys() -> None:
    model = polynl.insert(small("poly_nl"), "conv", after="stem", channels=4)
    assert influence_maps(model, two()[0], block="conv").shape == (3, 4, 3, 4)
    sub_sampled = small("non_local", mode="gaussian", sub_sample="before")
    assert influence_maps(sub_sampled, two()[0]).shape == (3, 4, 1, 2)


def test_all_maps_of_a_detector_are_without_the_padding() -> None:
    model, image = with_random_blocks(masks()), images((40, 64))[0]
    maps = influence_maps(model, image)
    assert maps.shape == (3, 4, 3, 4)
    assert_close(maps[2, 1], influence_map(model, image, (20, 39)), 1e-6)


# Errors


@pytest.mark.parametrize(
    ("spot", "said"),
    [
        ((8, 0), r"^position 8, 0 is outside the image, which is 8 wide and 6 high$"),
        ((0, -1), r"^position 0, -1 is outside the image"),
        ((3, 3, 3, 5), r"^box \(3, 3, 3, 5\) is empty"),
        ((9, 0, 12, 5), r"^box \(9, 0, 12, 5\) is outside the image"),
        (
            (1, 2, 3),
            r"^spot=\(1, 2, 3\): expected x, y or left, top, right, bottom, for all or for each of 2",
        ),
        ([(1, 2)], r"^spot=\[\(1, 2\)\]: expected"),
        ([(1, 2), (1, 2), (1, 2)], r"for all or for each of 2 images$"),
        ([(1, 2), (1, 2, 3)], r"for all or for each of 2 images$"),
        ((), r"^spot=\(\): expected x, y"),
    ],
    ids=str,
)
def test_spots_that_are_not_on_the_image_are_refused(spot: Any, said: str) -> None:
    model = small("poly_nl")
    with untouched(model), pytest.raises(ValueError, match=said):
        influence_map(model, two(), spot)


def test_blocks_without_influence_are_refused() -> None:
    model = small("tesa")
    for call in (lambda: influence_map(model, two(), (0, 0)), lambda: influence_maps(model, two()[0])):
        with (
            untouched(model),
            pytest.raises(
                ValueError, match=r"^TESA has no influence maps: its output is not a sum over positions$"
            ),
        ):
            call()
    plain = polynl.insert(
        classifier(), lambda channels: nn.Conv2d(channels, channels, 1), before="conv", channels=4
    )
    with pytest.raises(ValueError, match=r"^Conv2d has no influence maps"):
        influence_map(plain, two().float(), (0, 0))


def test_all_maps_are_of_one_image() -> None:
    with pytest.raises(ValueError, match=r"^image has the shape \(2, 3, 6, 8\); expected \(3, h, w\)$"):
        influence_maps(small("poly_nl"), two())
