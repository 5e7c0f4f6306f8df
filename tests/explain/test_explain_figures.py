"""What is drawn: the image, every network's map over it where it belongs, colour bars, marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torchvision.transforms.v2 import Identity

from polynl.explain.explanation import Answer
from polynl.explain.feature_norms import FeatureNorms
from polynl.explain.figures import FIGURES, cam_figure, influence_figure, norms_figure
from polynl.explain.networks import Subject

HEIGHT, WIDTH = 30, 40
IMAGE = torch.arange(3 * HEIGHT * WIDTH).remainder(251).to(torch.uint8).reshape(3, HEIGHT, WIDTH)
MAP = torch.tensor([[0.0, 1.0, 2.0, 4.0], [3.0, 0.5, 1.5, 2.5], [0.0, 0.0, 1.0, 8.0]])


def looked(name: str, **found: Any) -> Answer:
    subject = Subject(name, nn.Identity(), {}, Identity(), lambda image: image)
    return Answer(subject, IMAGE, f"a {name}", **found)


def panels(figure: Figure | None) -> list[Any]:
    """The axes with pictures, without those of colour bars."""
    assert figure is not None
    return [axes for axes in figure.axes if axes.images]


def bars(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [axes.get_ylabel() for axes in figure.axes if not axes.images]


def over(axes: Any) -> Any:
    """The map over the picture, which it covers."""
    below, above = axes.images
    for image in (below, above):
        assert tuple(image.get_extent()) == (-0.5, WIDTH - 0.5, HEIGHT - 0.5, -0.5)
    return above


def marked(axes: Any) -> list[Any]:
    return [*axes.lines, *axes.patches]


def test_grad_cam_of_every_network_beside_the_image() -> None:
    figure = cam_figure([looked("dog", cam=MAP), looked("none"), looked("cat", cam=2 * MAP)])
    image, *others = panels(figure)
    assert np.array_equal(image.images[0].get_array(), IMAGE.permute(1, 2, 0))
    assert [axes.get_title() for axes in others] == ["dog\na dog", "cat\na cat"]
    for axes in others:
        assert np.allclose(over(axes).get_array(), MAP / 8), "by its highest value"
        assert over(axes).get_clim() == (0, 1)
    assert bars(figure) == ["Grad-CAM ÷ its highest value"]


def test_grad_cam_that_is_zero_stays_so() -> None:
    _, axes = panels(cam_figure([looked("dog", cam=torch.zeros(3, 4))]))
    assert not over(axes).get_array().any()


def test_norms_in_a_row_for_each_network_with_a_block() -> None:
    norms = FeatureNorms(MAP, torch.zeros(3, 4), 3 * MAP + 1)
    figure = norms_figure([looked("plain"), looked("dog", norms=norms), looked("cat", norms=norms)])
    found = panels(figure)
    assert len(found) == 8
    assert [axes.get_title() for axes in found[4:]] == [
        "cat",
        "X, what comes in",
        "Y, what the block adds: nothing",
        "Z, what goes out",
    ]
    for axes, values, limits in zip(found[1:4], norms, ((0, 8), (0, 1), (1, 25)), strict=True):
        assert np.allclose(over(axes).get_array(), values)
        assert over(axes).get_clim() == limits
    assert bars(figure) == ["norm"] * 6


@pytest.mark.parametrize(("spot", "marks"), [((5.0, 7.0), 2), ((5.0, 7.0, 9.0, 20.0), 2)])
def test_shares_in_percent_around_zero_with_the_place_marked(spot: Any, marks: int) -> None:
    shares = torch.tensor([[0.5, -1.25], [1.0, 0.75]])
    figure = influence_figure([looked("plain", spot=spot), looked("dog", spot=spot, shares=shares)])
    image, axes = panels(figure)
    assert np.allclose(over(axes).get_array(), 100 * shares)
    assert over(axes).get_clim() == (-125, 125)
    assert bars(figure) == ["share, %"]
    for one in (image, axes):
        assert len(marked(one)) == marks
        if len(spot) == 2:
            assert [line.get_xydata().tolist() for line in one.lines] == [[[5, 7]]] * 2
        else:
            assert [patch.get_bbox().extents.tolist() for patch in one.patches] == [[5, 7, 9, 20]] * 2


def test_a_block_that_adds_nothing_says_so() -> None:
    _, axes = panels(influence_figure([looked("dog", spot=(1, 2), shares=torch.zeros(3, 4))]))
    assert axes.get_title() == "dog\nits block adds nothing yet"
    assert over(axes).get_clim() == (-1, 1)


def test_the_box_of_a_detection_is_on_its_grad_cam() -> None:
    _, axes = panels(cam_figure([looked("dog", cam=MAP, box=(5.0, 7.0, 9.0, 20.0), spot=(1.0, 2.0))]))
    assert [patch.get_bbox().extents.tolist() for patch in axes.patches] == [[5, 7, 9, 20]] * 2


def test_places_that_differ_are_marked_on_the_maps_alone() -> None:
    shares = torch.ones(3, 4) / 12
    answers = [looked(name, spot=spot, shares=shares) for name, spot in (("dog", (1, 2)), ("cat", (3, 4)))]
    image, *others = panels(influence_figure(answers))
    assert (image.get_title(), marked(image)) == ("image", [])
    assert [axes.lines[0].get_xydata().tolist() for axes in others] == [[[1, 2]], [[3, 4]]]


def test_long_names_are_broken_and_blocks_named_where_there_are_several() -> None:
    name = "my_experiment_of_2026_poly_nl_width16_lr0.008_seed0_final"
    _, axes = panels(cam_figure([looked(name, cam=MAP)]))
    assert max(map(len, axes.get_title().splitlines())) < 40
    assert axes.get_title().replace("\n", "").startswith(name)
    norms = FeatureNorms(MAP, MAP, MAP)
    assert (
        panels(norms_figure([looked("dog", norms=norms, block="layer3.1")]))[0].get_title() == "dog, layer3.1"
    )


def test_nothing_to_draw() -> None:
    assert [draw([looked("plain")]) for draw in FIGURES.values()] == [None] * 3
