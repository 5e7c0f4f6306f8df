"""Figures: the image, every network's map over it, colour bars, marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision.transforms.v2 import Identity

from polynl.explain.explanation import Explanation
from polynl.explain.feature_norms import FeatureNorms
from polynl.explain.figures import FIGURES, LEVELS, SIGNED, cam_figure, influence_figure, norms_figure
from polynl.explain.networks import ExplainedNetwork
from polynl.explain.overlay import overlay

HEIGHT, WIDTH = 30, 40
IMAGE = torch.arange(3 * HEIGHT * WIDTH).remainder(251).to(torch.uint8).reshape(3, HEIGHT, WIDTH)
MAP = torch.tensor([[0.0, 1.0, 2.0, 4.0], [3.0, 0.5, 1.5, 2.5], [0.0, 0.0, 1.0, 8.0]])


def explanation(name: str, **found: Any) -> Explanation:
    network = ExplainedNetwork(name, nn.Identity(), {}, Identity(), lambda image: image)
    return Explanation(network, IMAGE, f"a {name}", 0.5, **found)


def panels(figure: Figure | None) -> list[Any]:
    """The axes with pictures, without those of colour bars."""
    assert figure is not None
    return [axes for axes in figure.axes if axes.images]


def bars(figure: Figure | None) -> list[tuple[str, tuple[float, float]]]:
    """The label and the limits of every colour bar."""
    assert figure is not None
    return [(axes.get_ylabel(), axes.get_ylim()) for axes in figure.axes if not axes.images]


def assert_shows(axes: Any, values: Tensor, limits: tuple[float, float], *, signed: bool = False) -> None:
    """The map over the image, in the image's coordinates and at the resolution of the panel."""
    (image,) = axes.images
    assert tuple(image.get_extent()) == (-0.5, WIDTH - 0.5, HEIGHT - 0.5, -0.5)
    pixels = torch.from_numpy(np.asarray(image.get_array())).permute(2, 0, 1)
    height, width = pixels.shape[1:]
    assert width >= 403
    assert (height % HEIGHT, width % WIDTH) == (0, 0), "all pixels of the image are of one size"
    style = SIGNED if signed else LEVELS
    expected = overlay(IMAGE, values, limits=limits, size=(height, width), **style)
    assert torch.equal(pixels, expected)


def marked(axes: Any) -> list[Any]:
    return [*axes.lines, *axes.patches]


def test_grad_cam_of_every_network_beside_the_image() -> None:
    figure = cam_figure([explanation("dog", cam=MAP), explanation("none"), explanation("cat", cam=2 * MAP)])
    image, *others = panels(figure)
    assert np.array_equal(image.images[0].get_array(), IMAGE.permute(1, 2, 0))
    assert [axes.get_title() for axes in others] == ["dog\na dog, 50%", "cat\na cat, 50%"]
    for axes in others:
        assert_shows(axes, MAP / 8, (0, 1))
    assert bars(figure) == [("Grad-CAM ÷ its maximum", (0, 1))]


def test_grad_cam_that_is_zero_stays_so() -> None:
    _, axes = panels(cam_figure([explanation("dog", cam=torch.zeros(3, 4))]))
    assert_shows(axes, torch.zeros(3, 4), (0, 1))


def test_norms_in_a_row_for_each_network_with_a_block() -> None:
    norms = FeatureNorms(MAP, torch.zeros(3, 4), 3 * MAP + 1)
    trained = norms._replace(y=MAP / 1024)
    figure = norms_figure(
        [explanation("plain"), explanation("dog", norms=norms), explanation("cat", norms=trained)]
    )
    found = panels(figure)
    titles = [axes.get_title() for axes in found]
    assert titles[4:] == ["cat", "X, input", "Y, added by the block\n‖Y‖ ÷ ‖X‖ = 0.00098", "Z, output"]
    assert titles[2] == "Y, added by the block\nnothing, the block is new or untrained"
    every_limit = ((0, 8), (0, 1), (1, 25))
    for axes, values, limits in zip(found[1:4], norms, every_limit, strict=True):
        assert_shows(axes, values, limits)
    assert_shows(found[6], trained.y, (0, 8 / 1024))
    assert bars(figure) == [("norm", limits) for limits in (*every_limit, (0, 8), (0, 8 / 1024), (1, 25))]


@pytest.mark.parametrize(("spot", "marks"), [((5.0, 7.0), 2), ((5.0, 7.0, 9.0, 20.0), 2)])
def test_shares_in_percent_around_zero_with_the_place_marked(spot: Any, marks: int) -> None:
    shares = torch.tensor([[0.5, -1.25], [1.0, 0.75]])
    figure = influence_figure([explanation("plain", spot=spot), explanation("dog", spot=spot, shares=shares)])
    image, axes = panels(figure)
    assert axes.get_title() == "dog\ninfluence on the marked place"
    assert_shows(axes, 100 * shares, (-125, 125), signed=True)
    assert bars(figure) == [("share, %", (-125, 125))]
    for one in (image, axes):
        assert len(marked(one)) == marks
        if len(spot) == 2:
            assert [line.get_xydata().tolist() for line in one.lines] == [[[5, 7]]] * 2
        else:
            assert [patch.get_bbox().extents.tolist() for patch in one.patches] == [[5, 7, 9, 20]] * 2


def test_a_block_that_adds_nothing_says_so() -> None:
    figure = influence_figure([explanation("dog", spot=(1, 2), shares=torch.zeros(3, 4))])
    _, axes = panels(figure)
    assert axes.get_title() == "dog\nits block adds nothing yet"
    assert_shows(axes, torch.zeros(3, 4), (-1, 1), signed=True)
    assert bars(figure) == [("share, %", (-1, 1))]


def test_the_influence_of_an_untrained_block_is_marked_as_such() -> None:
    norms = FeatureNorms(MAP, torch.zeros(3, 4), MAP)
    figure = influence_figure([explanation("dog", spot=(1, 2), shares=MAP / MAP.sum(), norms=norms)])
    assert panels(figure)[1].get_title() == "dog\nuntrained: what its block would add"


def test_the_box_of_a_detection_is_on_its_grad_cam() -> None:
    _, axes = panels(cam_figure([explanation("dog", cam=MAP, box=(5.0, 7.0, 9.0, 20.0), spot=(1.0, 2.0))]))
    assert [patch.get_bbox().extents.tolist() for patch in axes.patches] == [[5, 7, 9, 20]] * 2


def test_places_that_differ_are_marked_on_the_maps_alone() -> None:
    shares = torch.ones(3, 4) / 12
    both = [explanation(name, spot=spot, shares=shares) for name, spot in (("dog", (1, 2)), ("cat", (3, 4)))]
    image, *others = panels(influence_figure(both))
    assert (image.get_title(), marked(image)) == ("image", [])
    assert [axes.lines[0].get_xydata().tolist() for axes in others] == [[[1, 2]], [[3, 4]]]


def test_long_names_are_broken_and_blocks_named_where_there_are_several() -> None:
    name = "my_experiment_of_2026_poly_nl_width16_lr0.008_seed0_final"
    _, axes = panels(cam_figure([explanation(name, cam=MAP)]))
    assert max(map(len, axes.get_title().splitlines())) < 40
    assert axes.get_title().replace("\n", "").startswith(name)
    norms = FeatureNorms(MAP, MAP, MAP)
    assert (
        panels(norms_figure([explanation("dog", norms=norms, block="layer3.1")]))[0].get_title()
        == "dog, layer3.1"
    )


def test_nothing_to_draw() -> None:
    assert [draw([explanation("plain")]) for draw in FIGURES.values()] == [None] * 3
