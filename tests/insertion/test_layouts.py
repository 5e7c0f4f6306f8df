"""Blocks go on maps whose channels are on axis 1; every other layout is refused by its name."""

import re

import pytest
import torch
import torchvision
from torch import nn

from polynl.blocks.poly_nl import PolyNL
from polynl.insertion import insert, inserted


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class Mixed(nn.Module):
    """A map, its tokens, and back: a network of both layouts."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.act = nn.ReLU()
        self.tokens = nn.Sequential(nn.Identity(), nn.Linear(8, 8))
        self.rows = nn.Sequential(nn.Identity(), nn.LayerNorm(8))

    def forward(self, x):
        x = self.act(self.stem(x))
        x = self.tokens(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])
        return self.rows(x.permute(0, 2, 3, 1))


class OnTokens(nn.Module):
    """What errors advise: a module that moves the channels to axis 1 and back."""

    def __init__(self, channels):
        super().__init__()
        self.block = PolyNL(channels, init="random")

    def forward(self, x):
        return self.block(x.mT).mT


# Refused


@pytest.mark.parametrize(
    ("make", "side", "place", "shape"),
    [
        (encoder_layer, "before", "", (2, 5, 8)),
        (encoder_layer, "after", "linear1", (2, 5, 8)),
        (lambda: nn.TransformerEncoder(encoder_layer(), 2), "before", "layers.1", (2, 5, 8)),
        (lambda: nn.TransformerEncoder(encoder_layer(), 2), "after", "", (2, 8, 8)),
        (lambda: nn.Sequential(nn.ReLU(), nn.GRU(8, 8, batch_first=True)), "before", "0", (2, 5, 8)),
        (Mixed, "before", "tokens", (2, 3, 4, 6)),
    ],
)
def test_tokens_are_refused(make, side, place, shape):
    with pytest.raises(ValueError, match=r"tokens \(b, n, c\) of shape \(2, \d+, (8|16)\): choose a place"):
        insert(make(), "poly_nl", **{side: place}, example=torch.zeros(shape))


@pytest.mark.parametrize(
    ("name", "target", "size", "layout"),
    [
        ("swin_t", "features.1.0", (64, 64), "a map (b, h, w, c) of shape (1, 16, 16, 96)"),
        ("swin_t", "features.3.1", (68, 100), "a map (b, h, w, c) of shape (1, 9, 13, 192)"),
        ("convnext_tiny", "features.1.0.block.2", (64, 64), "a map (b, h, w, c) of shape (1, 16, 16, 96)"),
        ("swin3d_t", "features.0.0", (4, 64, 64), "a map (b, d, h, w, c) of shape (1, 2, 16, 16, 96)"),
        ("vit_b_32", "encoder.layers.encoder_layer_1", (224, 224), "tokens (b, n, c) of shape (1, 50, 768)"),
    ],
)
def test_networks_that_keep_channels_last_are_refused(name, target, size, layout):
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
    with pytest.raises(ValueError, match=rf'"{target}" .*{re.escape(layout)}'):
        insert(model, "poly_nl", before=target, example=torch.zeros(1, 3, *size, device="meta"))


def test_a_layer_tells_the_layout_where_sizes_do_not():
    """8 × 8 positions and 8 channels: proportions would allow every layout."""
    with pytest.raises(ValueError, match=r"map \(b, h, w, c\) of shape \(2, 8, 8, 8\)"):
        insert(nn.Sequential(nn.LayerNorm(8)), "poly_nl", before="0", example=torch.zeros(2, 8, 8, 8))


def test_layers_that_disagree_are_refused_until_an_example_tells_them_apart():
    square, other = torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 4, 8)
    with pytest.raises(ValueError, match=r"axis 1 for some layers and on axis 3 for others: pass an example"):
        insert(Mixed(), "poly_nl", after="act", example=square)
    assert inserted(insert(Mixed(), "poly_nl", after="act", example=other))["act.polynl_after"].channels == 8


def test_an_example_without_a_batch_axis_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    with pytest.raises(ValueError, match=r"\(8, 5, 6\) without a batch axis: pass an example that has one"):
        insert(model, "poly_nl", after="1", example=torch.zeros(3, 5, 6))
    insert(model, "poly_nl", after="1", example=torch.zeros(1, 3, 5, 6))


# Advice that errors give, followed


def test_a_module_that_moves_the_channels_goes_where_blocks_cannot():
    model, x = encoder_layer().eval(), torch.randn(2, 5, 8)
    expected = model(x)
    with pytest.raises(ValueError, match=r"insert a module of your own that moves them .*, with channels=8"):
        insert(model, OnTokens, after="", example=x)
    insert(model, OnTokens, after="", channels=8)
    torch.testing.assert_close(model(x), model.polynl_after(expected))


def test_channels_given_are_believed_where_they_seem_to_come_last():
    model, x = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Flatten(2)), torch.randn(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"already, pass channels=6 and no example="):
        insert(model, "poly_nl", after="1", example=x)
    assert insert(model, "poly_nl", after="1", channels=6)(x).shape == (2, 6, 16)


def test_wrong_channels_are_refused_at_run_time_with_what_to_do():
    model, x = encoder_layer(), torch.randn(2, 5, 8)
    insert(model, "poly_nl", after="", channels=8)
    with pytest.raises(ValueError, match=r"the block after TransformerEncoderLayer .*tokens \(b, n, c\)"):
        model(x)
    model = insert(nn.Conv2d(3, 6, 1), "poly_nl", after="", channels=5)
    with pytest.raises(ValueError, match=r"after Conv2d was made for 5 channels, got 6 .*with channels=6"):
        model(torch.randn(1, 3, 4, 4))


# Not refused


@pytest.mark.parametrize("length", [20, 8])
def test_signals_are_maps_with_one_axis(length):
    model = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 1))
    model.append(nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)))
    insert(model, "poly_nl", after=["0", "2"], example=torch.randn(2, 2, length))
    assert [block.channels for block in inserted(model).values()] == [8, 8]


def test_without_layers_axis_1_holds_the_channels():
    assert insert(nn.ReLU(), "poly_nl", after="", example=torch.randn(2, 5, 8)).polynl_after.channels == 5


def test_as_many_channels_as_rows_are_not_taken_for_channels_last():
    model = insert(nn.Conv2d(3, 16, 1), "poly_nl", after="", example=torch.zeros(1, 3, 16, 16))
    assert model.polynl_after.channels == 16


def test_a_norm_that_permutes_is_not_taken_for_channels_last():
    """LayerNorm2d is a LayerNorm whose input has its channels on axis 1."""
    norm = torchvision.models.convnext.LayerNorm2d(8)
    model = insert(
        nn.Sequential(norm, nn.Conv2d(8, 8, 1)), "poly_nl", before="0", example=torch.zeros(1, 8, 4, 8)
    )
    assert norm.polynl_before.channels == 8
    assert model(torch.zeros(1, 8, 4, 8)).shape == (1, 8, 4, 8)


# The guessed input


class Pyramid(nn.Module):
    """Registers its lateral convolutions before the network that they follow, like detectron2's FPN."""

    def __init__(self):
        super().__init__()
        self.lateral = nn.Conv2d(64, 16, 1)
        self.bottom_up = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 64, 3, stride=2))

    def forward(self, x):
        return self.lateral(self.bottom_up(x))


class Halving(nn.Module):
    """Refuses volumes whose axes cannot be halved five times, like monai's SwinUNETR."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(1, 4, 2, stride=2)

    def forward(self, x):
        if any(size % 32 for size in x.shape[2:]):
            raise ValueError(f"spatial dimensions {x.shape[2:]} must be divisible by 32")
        return self.stem(x)


@pytest.mark.parametrize(("make", "place", "channels"), [(Pyramid, "lateral", 64), (Halving, "stem", 1)])
def test_the_guess_fits_networks_with_a_stem_registered_late_or_many_strides(make, place, channels):
    model = insert(make(), "poly_nl", before=place)
    assert model.get_submodule(place).polynl_before.channels == channels


def test_without_a_convolution_of_few_channels_the_first_is_taken():
    model = nn.Sequential(nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 1))
    assert insert(model, "poly_nl", before="0")[0].polynl_before.channels == 16


def test_the_layers_of_a_block_say_nothing_about_the_host() -> None:
    """On a map with as many positions as channels, they would: they see it folded."""
    model = nn.Sequential(nn.Conv1d(3, 16, 1), nn.Conv1d(16, 16, 1))
    for place in ("0", "1"):
        insert(model, "poly_nl", after=place, example=torch.randn(1, 3, 16))
    assert len(inserted(model)) == 2
