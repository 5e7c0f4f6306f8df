"""The network for small images: its stages, what a position sees, and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck

from polynl import inserted
from polynl.models.resnet import SmallResNet, resnet


@pytest.mark.parametrize("width", [2, 4, 6, 16])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_stages_have_4_6_and_8_times_the_width(width: int, depth: int) -> None:
    model = SmallResNet(depth=depth, width=width, num_classes=5).eval()
    x = torch.randn(2, 3, 24, 24)
    maps = []
    for stage in (model.layer1, model.layer2, model.layer3):
        stage.register_forward_hook(lambda module, args, output: maps.append(tuple(output.shape[1:])))
        assert [type(block) for block in stage] == [Bottleneck] * depth
    assert model(x).shape == (2, 5)
    assert maps == [(4 * width, 12, 12), (6 * width, 6, 6), (8 * width, 6, 6)]


@pytest.mark.parametrize("side", [16, 17, 31, 40])
def test_any_side_will_do(side: int) -> None:
    assert SmallResNet(width=4)(torch.randn(2, 3, side, side)).shape == (2, 10)


def test_a_position_sees_19_by_19_pixels() -> None:
    torch.manual_seed(0)
    model = SmallResNet(width=4).eval()
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    model.features(x)[0, :, 8, 8].sum().backward()
    rows, columns = x.grad[0].abs().sum(0).nonzero().unbind(1)
    assert {rows.min().item(), columns.min().item()} == {32 - 9}
    assert {rows.max().item(), columns.max().item()} == {32 + 9}


def test_the_classifier_takes_the_mean_of_the_last_map() -> None:
    torch.manual_seed(0)
    model = SmallResNet(width=4).eval()
    x = torch.randn(2, 3, 20, 20)
    torch.testing.assert_close(model(x), model.fc(model.features(x).mean((2, 3))))


@pytest.mark.parametrize(
    ("placement", "places"),
    [("res3", ["layer2.1"]), ("res4", ["layer3.1"]), (["res4", "layer1.0"], ["layer1.0", "layer3.1"])],
)
def test_placements_mean_what_they_mean_in_larger_networks(placement: Any, places: list[str]) -> None:
    model = resnet(
        "small_resnet", block="poly_nl", placement=placement, arch_options={"depth": 2, "width": 4}
    )
    assert sorted(inserted(model)) == [f"{place}.polynl_before" for place in places]
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 1000)


def test_residual_branches_begin_at_zero_where_asked() -> None:
    for asked in (False, True):
        model = SmallResNet(depth=2, width=4, zero_init_residual=asked)
        scales = [block.bn3.weight for stage in (model.layer1, model.layer2, model.layer3) for block in stage]
        assert len(scales) == 6
        assert {bool(scale.any()) for scale in scales} == {not asked}


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    model, x = SmallResNet(width=4, dropout=0.5), torch.randn(2, 3, 16, 16)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = 0.0
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"depth": 0}, "depth=0: expected a whole number above 0"),
        ({"depth": 1.5}, "depth=1.5: expected a whole number above 0"),
        ({"width": 0}, "width=0: expected a whole number above 0"),
        ({"width": "wide"}, "width='wide': expected a whole number above 0"),
        ({"width": 5}, "width=5: expected an even number"),
        ({"dropout": -0.1}, r"dropout=-0\.1: expected a number from 0 to 1"),
        ({"dropout": 1.1}, r"dropout=1\.1: expected a number from 0 to 1"),
        ({"dropout": "some"}, "dropout='some': expected a number from 0 to 1"),
    ],
)
def test_options_that_make_no_network(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        SmallResNet(**options)
