"""Blocks go on maps with channels first or last and on tokens; the layout is found or given."""

import pytest
import torch
import torchvision
from hosts import layout_at
from torch import nn

from polynl.insertion import insert, inserted, remove
from polynl.insertion.layouts import Layout


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


def by_hand(block, x, prefix, grid):
    """What a block does with tokens, written out."""
    y = block(x[:, prefix:].mT.unflatten(2, grid)).flatten(2).mT
    return torch.cat([x[:, :prefix], y], 1)


# Found


@pytest.mark.parametrize(
    ("make", "side", "place", "shape"),
    [
        (encoder_layer, "before", "", (2, 5, 8)),
        (encoder_layer, "after", "linear2", (2, 5, 8)),
        (lambda: nn.TransformerEncoder(encoder_layer(), 2), "before", "layers.1", (2, 5, 8)),
        (lambda: nn.TransformerEncoder(encoder_layer(), 2), "after", "", (2, 8, 8)),
        (lambda: nn.Sequential(nn.ReLU(), nn.GRU(8, 8, batch_first=True)), "before", "0", (2, 5, 8)),
        (Mixed, "before", "tokens", (2, 3, 4, 6)),
    ],
)
def test_tokens_are_found(make, side, place, shape):
    model = insert(make(), "poly_nl", **{side: place}, example=torch.zeros(shape))
    ((name, block),) = inserted(model).items()
    assert block.channels == 8
    assert layout_at(model, name) == Layout("tokens", 0, (4, 6) if len(shape) == 4 else None)


@pytest.mark.parametrize(
    ("name", "target", "size", "layout", "channels"),
    [
        ("swin_t", "features.3.1", (68, 100), Layout("channels_last"), 192),
        ("convnext_tiny", "features.1.0.block.2", (64, 64), Layout("channels_last"), 96),
        ("swin3d_t", "features.0.0", (4, 64, 64), Layout("channels_last"), 96),
        ("vit_b_32", "encoder.layers.encoder_layer_1", (224, 224), Layout("tokens", 1, (7, 7)), 768),
    ],
)
def test_layouts_of_torchvision_are_found(name, target, size, layout, channels):
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
    insert(model, "poly_nl", before=target, example=torch.zeros(1, 3, *size, device="meta"))
    assert layout_at(model, f"{target}.polynl_before") == layout
    assert inserted(model)[f"{target}.polynl_before"].channels == channels


def test_a_layer_tells_the_layout_where_sizes_do_not():
    """8 × 8 positions and 8 channels: proportions would allow every layout."""
    model = insert(nn.Sequential(nn.LayerNorm(8)), "poly_nl", before="0", example=torch.zeros(2, 8, 8, 8))
    assert layout_at(model, "0.polynl_before") == Layout("channels_last")


def test_flat_maps_are_told_from_tokens_by_their_number_of_positions():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Flatten(2))
    insert(model, "poly_nl", after="1", example=torch.randn(2, 3, 4, 4))
    assert layout_at(model, "1.polynl_after") == Layout()
    with pytest.raises(
        ValueError, match=r"\(2, 16, 16\), whose channels can be on axis 1 and on axis 2: pass"
    ):
        insert(
            nn.Sequential(nn.Conv2d(3, 16, 1), nn.Flatten(2)), "se", after="1", example=torch.ones(2, 3, 4, 4)
        )


class Prefixed(nn.Module):
    """Patches of 2 × 2 pixels as tokens after some others, as a vision transformer has them."""

    def __init__(self, prefix=1, claim=None):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.prefix = nn.Parameter(torch.randn(1, prefix, 8))
        self.block = nn.LayerNorm(8)
        if claim is not None:
            self.num_prefix_tokens = claim

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        return self.block(torch.cat([self.prefix.expand(len(x), -1, -1), x], 1))


@pytest.mark.parametrize(
    ("prefix", "claim", "grid"),
    [
        (0, None, (3, 5)),
        (1, None, (3, 5)),
        (5, None, (3, 5)),
        (20, 20, (3, 5)),
        (0, 1, (3, 5)),
        (20, None, None),
    ],
)
def test_prefix_tokens_and_the_grid_are_found(prefix, claim, grid):
    model, x = Prefixed(prefix, claim), torch.randn(2, 3, 6, 10)
    insert(model, "poly_nl", before="block", example=x)
    # 35 tokens without a claim are no grid of 3 × 5 with a short prefix.
    assert layout_at(model, "block.polynl_before") == Layout("tokens", prefix if grid else 0, grid)


class Unfolded(nn.Module):
    """Patches as tokens without a convolution, as in TNT: no map has their grid."""

    num_prefix_tokens = 1

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(12, 8)
        self.block = nn.LayerNorm(8)

    def forward(self, x):
        x = self.patches(nn.functional.unfold(x, 2, stride=2).mT)
        return self.block(torch.cat([x.mean(1, keepdim=True), x], 1))


def test_a_claimed_prefix_is_believed_only_where_it_leaves_a_grid():
    model, x = Unfolded(), torch.zeros(2, 3, 6, 10)
    insert(model, "poly_nl", before="block", after="patches", example=x)
    assert layout_at(model, "block.polynl_before") == Layout("tokens", 1, (3, 5))
    assert layout_at(model, "patches.polynl_after") == Layout("tokens", 0, (3, 5))


# Run


@pytest.mark.parametrize("prefix", [0, 2])
def test_a_block_gets_the_tokens_as_a_map_and_leaves_the_prefix_alone(prefix):
    model, x = Prefixed(prefix), torch.randn(2, 3, 6, 10)
    seen = []
    model.block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    expected = model(x)
    insert(model, "conv", before="block", kernel_size=3, example=x)
    assert torch.equal(model(x), expected)
    nn.init.normal_(model.block.polynl_before.weight)
    mixed = by_hand(model.block.polynl_before, seen[0], prefix, (3, 5))
    torch.testing.assert_close(model(x), nn.functional.layer_norm(mixed, (8,)))


def test_a_map_with_channels_last_is_moved_and_back():
    model, x = nn.Sequential(nn.LayerNorm(8)), torch.randn(2, 3, 4, 8)
    insert(model, "conv", after="0", kernel_size=3, init="random", example=x)
    y = nn.functional.layer_norm(x, (8,))
    block = model[0].polynl_after
    assert torch.equal(model(x), block(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
    assert model(x).is_contiguous()


def test_tokens_of_another_image_size_get_a_grid_of_the_same_proportions():
    model = insert(Prefixed(), "conv", before="block", kernel_size=3, example=torch.zeros(1, 3, 6, 10))
    seen = []
    model.block.polynl_before.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[2:]))
    model(torch.zeros(1, 3, 12, 20))
    assert seen == [(6, 10)]
    with pytest.raises(
        ValueError, match=r"ConvBaseline needs the grid of positions, and 16 tokens do not fit"
    ):
        model(torch.zeros(1, 3, 8, 8))


def test_a_block_that_does_not_look_at_places_takes_any_number_of_tokens():
    model = insert(Prefixed(), "poly_nl", before="block", init="random", example=torch.zeros(1, 3, 6, 10))
    x = torch.randn(1, 3, 8, 8)
    tokens = torch.cat([model.prefix, model.patches(x).flatten(2).mT], 1)
    expected = nn.functional.layer_norm(by_hand(model.block.polynl_before, tokens, 1, (16,)), (8,))
    torch.testing.assert_close(model(x), expected)


def test_a_block_that_looks_at_places_needs_a_grid():
    model, x, options = encoder_layer(), torch.randn(2, 6, 8), {"kernel_size": 3}
    with pytest.raises(
        ValueError, match=r"no grid is known for the tokens .* ConvBaseline needs it: pass grid="
    ):
        insert(model, "conv", before="", example=x, **options)
    insert(model, "conv", before="", example=x, grid=(2, 2), **options)
    assert layout_at(model, "polynl_before") == Layout("tokens", 2, (2, 2))


# Given


def test_a_layout_that_is_given_is_believed():
    x = torch.randn(2, 6, 6, 6)
    model = insert(nn.Sequential(nn.LayerNorm(6)), "poly_nl", before="0", layout="channels_first", example=x)
    assert layout_at(model, "0.polynl_before") == Layout()
    model = insert(Prefixed(claim=1), "poly_nl", before="block", layout="tokens", channels=8)
    assert layout_at(model, "block.polynl_before") == Layout("tokens", 1, None)
    model = insert(Prefixed(), "poly_nl", before="block", prefix_tokens=3, example=torch.zeros(1, 3, 6, 10))
    assert layout_at(model, "block.polynl_before") == Layout("tokens", 3, None)


def test_a_prefix_and_a_grid_that_do_not_fit_are_refused():
    for options in ({"prefix_tokens": 16}, {"prefix_tokens": 0, "grid": (3, 5)}, {"grid": (5, 5)}):
        with pytest.raises(ValueError, match=r"got 16 tokens, which are not "):
            insert(Prefixed(), "poly_nl", before="block", example=torch.zeros(1, 3, 6, 10), **options)


def test_a_wrong_layout_is_refused_at_run_time_with_what_to_do():
    x = torch.randn(2, 5, 8)
    model = insert(encoder_layer(), "poly_nl", after="", channels=8)
    with pytest.raises(ValueError, match=r"after TransformerEncoderLayer .*tokens .*with layout='tokens'"):
        model(x)
    assert insert(remove(model), "poly_nl", after="", channels=8, layout="tokens")(x).shape == x.shape


def test_wrong_channels_are_refused_at_run_time_with_what_to_do():
    model = insert(nn.Conv2d(3, 6, 1), "poly_nl", after="", channels=5)
    with pytest.raises(ValueError, match=r"after Conv2d was made for 5 channels, got 6 .*with channels=6"):
        model(torch.randn(1, 3, 4, 4))


# Refused


def test_layers_that_disagree_are_refused_until_an_example_tells_them_apart():
    square, other = torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 4, 8)
    with pytest.raises(
        ValueError, match=r"can be on axis 1 and on axis 3: pass an example .* layout=, one of"
    ):
        insert(Mixed(), "poly_nl", after="act", example=square)
    for options in ({"example": other}, {"example": square, "layout": "channels_first"}):
        model = insert(Mixed(), "poly_nl", after="act", **options)
        assert layout_at(model, "act.polynl_after") == Layout()


def test_an_example_without_a_batch_axis_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    with pytest.raises(ValueError, match=r"\(8, 5, 6\) without a batch axis: pass an example that has one"):
        insert(model, "poly_nl", after="1", example=torch.zeros(3, 5, 6))
    insert(model, "poly_nl", after="1", example=torch.zeros(1, 3, 5, 6))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.block = nn.LayerNorm(8)

    def forward(self, x):
        return self.block(self.patches(x).flatten(2).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("make", "place", "shape"),
    [(lambda: nn.TransformerEncoderLayer(8, 2, 16), "", (5, 2, 8)), (SequenceFirst, "block", (2, 3, 8, 8))],
)
def test_tokens_with_the_batch_on_axis_1_are_refused(make, place, shape):
    """A block would mix the samples of a batch."""
    with pytest.raises(ValueError, match=r"tokens \(n, b, c\) of shape \(\d+, 2, 8\)"):
        insert(make(), "poly_nl", before=place, example=torch.zeros(shape))


# Channels on axis 1


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
