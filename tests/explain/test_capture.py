"""Frames, cell by cell; what a forward pass records, and that it leaves the network unchanged."""

import copy
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from literal_parts import randomised
from tiny_networks import PADDED, classifier, faces, images, masks, untouched
from torch import Tensor, nn

import polynl
from polynl import PolyNL
from polynl.explain.capture import Frame, block_of, capture, forward, is_detector, only_call

# Frames


@pytest.mark.parametrize(
    ("covered", "shape", "expected"),
    [
        ((1.0, 1.0), (4, 6), (4, 6)),
        ((0.5, 1.0), (4, 6), (2, 6)),
        ((1.0, 0.5), (4, 6), (4, 3)),
        ((0.75, 40 / 64), (4, 8), (3, 5)),
        ((50 / 64, 33 / 64), (8, 8), (7, 5)),  # cells that the image ends in are its own
        ((0.01, 1e-9), (4, 6), (1, 1)),
        ((1 / 3, 2 / 3), (3, 3), (1, 2)),
        ((0.1 + 0.2, 1.0), (10, 1), (3, 1)),  # 3.0000000000000004 rows are three
    ],
)
def test_maps_are_cropped_at_the_padding(
    covered: tuple[float, float], shape: tuple[int, int], expected: tuple[int, int]
) -> None:
    values = torch.arange(math.prod(shape)).reshape(shape)
    assert torch.equal(Frame(100, 100, covered).crop(values), values[: expected[0], : expected[1]])
    clip = torch.stack([values, values + 100])
    assert torch.equal(Frame(100, 100, covered).crop(clip), clip[:, : expected[0], : expected[1]])


AXES = [
    (pixels, padded, cells)
    for pixels in (1, 2, 3, 5, 6, 7, 22, 49)
    for padded in (pixels, pixels + 1, pixels + 3, 2 * pixels)
    for cells in (1, 2, 3, 4, 7, pixels)
]


def test_the_cell_of_every_point() -> None:
    """A cell is as high as a whole number of pixels of the padded image, or a fraction of one."""
    for pixels, padded, cells in AXES:
        along_rows = Frame(pixels, 1, (pixels / padded, 1.0))
        along_columns = Frame(1, pixels, (1.0, pixels / padded))
        for pixel in range(pixels):
            for point in (Fraction(pixel), Fraction(2 * pixel + 1, 2)):
                cell = math.floor(point * cells / padded)
                expected, only = slice(cell, cell + 1), slice(0, 1)
                assert along_rows.cells((0, float(point)), (cells, 1)) == (expected, only)
                assert along_columns.cells((float(point), 0), (1, cells)) == (only, expected)


def test_the_cells_of_every_box_are_those_it_shares_area_with() -> None:
    for pixels, padded, cells in AXES:
        if pixels > 7:
            continue
        along_rows = Frame(pixels, 1, (pixels / padded, 1.0))
        along_columns = Frame(1, pixels, (1.0, pixels / padded))
        for start, stop in itertools.combinations(range(-2, pixels + 3), 2):
            first, last = max(start, 0), min(stop, pixels)
            if first >= last:
                continue
            size = Fraction(padded, cells)
            touched = [c for c in range(cells) if c * size < last and (c + 1) * size > first]
            expected = slice(touched[0], touched[-1] + 1)
            assert along_rows.cells((0, start, 1, stop), (cells, 1)) == (expected, slice(0, 1))
            assert along_columns.cells((start, 0, stop, 1), (1, cells)) == (slice(0, 1), expected)


def test_a_box_of_one_cell_by_hand() -> None:
    frame = Frame(64, 128)
    assert frame.cells((32, 0, 64, 32), (2, 4)) == (slice(0, 1), slice(1, 2))
    assert frame.cells((32, 0, 64.5, 32), (2, 4)) == (slice(0, 1), slice(1, 3))
    assert frame.cells((40, 40, 41, 41), (2, 4)) == (slice(1, 2), slice(1, 2))
    assert frame.cells((32, 0, 32.0000001, 32), (2, 4)) == (slice(0, 1), slice(1, 2))
    assert frame.cells((-math.inf, -5, math.inf, 500), (2, 4)) == (slice(0, 2), slice(0, 4))


def test_the_last_pixel_is_in_the_last_cell_that_the_image_covers() -> None:
    frame = Frame(30, 50, (30 / 64, 50 / 64))
    assert frame.cells((49.999999999, 29.999999999), (8, 8)) == (slice(3, 4), slice(6, 7))
    assert Frame(3, 3, (1e-9, 1e-9)).cells((2, 2), (4, 4)) == (slice(0, 1), slice(0, 1))
    last = math.nextafter(7, 0)
    assert Frame(7, 7).cells((last, last), (4, 4)) == (slice(3, 4), slice(3, 4))


@pytest.mark.parametrize("point", [(-0.1, 0), (0, -1), (20, 0), (0, 10), (math.nan, 0)])
def test_points_outside_are_refused(point: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"^position .* is outside the image, which is 20 wide and 10 high$"):
        Frame(10, 20).cells(point, (2, 2))


@pytest.mark.parametrize("box", [(5, 5, 5, 6), (5, 5, 6, 5), (6, 0, 5, 1), (0, 6, 1, 5), (0, math.nan, 1, 1)])
def test_empty_boxes_are_refused(box: Any) -> None:
    with pytest.raises(ValueError, match=r"is empty; expected left, top, right, bottom in pixels$"):
        Frame(10, 20).cells(box, (2, 2))


@pytest.mark.parametrize("box", [(-5, 0, 0, 5), (0, -5, 5, 0), (20, 0, 25, 5), (0, 10, 5, 15)])
def test_boxes_outside_are_refused(box: Any) -> None:
    with pytest.raises(ValueError, match=r"^box .* is outside the image, which is 20 wide and 10 high$"):
        Frame(10, 20).cells(box, (2, 2))


# Forward passes


def test_a_batch_a_list_and_an_image_are_run_in_eval_mode() -> None:
    model, (one, other) = classifier("poly_nl").train(), images((7, 10), (7, 10))
    expected = copy.deepcopy(model).eval()(torch.stack([one, other]))
    with untouched(model):
        output, frames = forward(model, torch.stack([one, other]))
        of_list, frames_of_list = forward(model, [one, other])
        of_one, frames_of_one = forward(model, one)
    assert torch.equal(output, expected)
    assert torch.equal(of_list, expected)
    torch.testing.assert_close(of_one, expected[:1])
    assert frames == frames_of_list == [Frame(7, 10), Frame(7, 10)]
    assert frames_of_one == [Frame(7, 10)]


def test_frames_of_a_detector_tell_images_from_padding() -> None:
    model = masks().train()
    with untouched(model), torch.no_grad():
        output, frames = forward(model, images(*PADDED))
        _, alone = forward(model, images((64, 32))[0])
        _, batch = forward(model, torch.stack(images((40, 64), (40, 64))))
    assert [len(found["scores"]) for found in output] == [5, 5]
    assert frames == [Frame(64, 32, (1.0, 0.5)), Frame(40, 64, (40 / 64, 1.0))]
    assert alone == [Frame(64, 32, (1.0, 1.0))]
    assert batch == [Frame(40, 64, (40 / 64, 1.0))] * 2


def test_frames_of_a_detector_that_resizes() -> None:
    with torch.no_grad():
        _, frames = forward(faces(), images(*PADDED))
    # 96×48 and 60×96, padded to multiples of 64.
    assert frames == [Frame(64, 32, (96 / 128, 48 / 128)), Frame(40, 64, (60 / 128, 96 / 128))]


def test_detectors_are_recognized() -> None:
    assert is_detector(masks(None))
    assert is_detector(faces())
    assert not is_detector(classifier())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (images((7, 10), (7, 9)), r"shapes \(3, 7, 9\) and \(3, 7, 10\); a batch needs one"),
        ([], "^images is empty$"),
        (torch.zeros(0, 3, 7, 10), "^images is empty$"),
        (torch.zeros(7, 10), r"images has the shape \(7, 10\); expected"),
        ([torch.zeros(1, 3, 7, 10)], r"an image has the shape \(1, 3, 7, 10\); expected \(3, h, w\)"),
    ],
)
def test_images_that_make_no_batch_are_refused(given: Any, said: str) -> None:
    model = classifier().train()
    with untouched(model), pytest.raises(ValueError, match=said):
        forward(model, given)


def test_detectors_refuse_clips() -> None:
    with pytest.raises(ValueError, match=r"an image has the shape \(3, 2, 7, 7\); expected \(3, h, w\)"):
        forward(masks(None), torch.zeros(1, 3, 2, 7, 7))


def test_an_error_in_a_detector_leaves_no_hooks() -> None:
    model = masks().train()
    with untouched(model), pytest.raises(RuntimeError):
        forward(model, images((64, 32))[0][:1].repeat(5, 1, 1))


# Recorded modules


def test_later_modules_do_not_write_into_a_recorded_activation() -> None:
    model = classifier("poly_nl")
    image = torch.stack(images((6, 8)))
    captured = capture(model, image, modules=["conv"])
    conv = captured.activations["conv"]
    with torch.no_grad():
        x = model.eval()[:4](image)
        x = model.conv.polynl_before(x)
        assert torch.equal(conv.input, x)
        assert torch.equal(
            conv.output, nn.functional.conv2d(x, model.conv.weight, model.conv.bias, padding=1)
        )
    assert (conv.output < 0).any(), "the ReLU in place would have cut something off"
    assert captured.frames == [Frame(6, 8)]
    assert not conv.output.requires_grad


def test_one_pass_records_everything() -> None:
    model, image = classifier("poly_nl").train(), torch.stack(images((6, 8)))
    passes: list[bool] = []
    model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    with untouched(model):
        captured = capture(model, image, modules=["conv.polynl_before", "stem"], map_layers=True)
    assert passes == [False]
    assert torch.equal(captured.output, forward(model, image)[0])
    assert list(captured.activations) == ["conv.polynl_before", "stem"]
    assert captured.map_layers == ["after", "conv", "conv.polynl_before", "relu", "norm", "stem"]
    assert capture(model, image).map_layers == []


def test_map_layers_of_a_detector_are_in_its_resnet() -> None:
    layers = capture(masks(), images(*PADDED), map_layers=True).map_layers
    assert layers[0] == "backbone.body.layer4"
    assert all(layer.startswith("backbone.body.") for layer in layers)


def test_a_block_may_get_its_input_by_name() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = randomised(PolyNL(3))

        def forward(self, images: Tensor) -> Tensor:
            return self.block(x=images)

    image = torch.stack(images((6, 8)))
    block = capture(ByName(), image, modules=["block"]).activations["block"]
    assert torch.equal(block.input, image)
    assert not torch.equal(block.output, image)


def test_hooks_are_gone_after_an_error() -> None:
    model = classifier("poly_nl").train()
    with untouched(model), pytest.raises(RuntimeError):
        capture(model, torch.zeros(1, 2, 4, 4), modules=["conv.polynl_before"], map_layers=True)


@pytest.mark.parametrize(("times", "said"), [(0, "never"), (2, "2 times"), (5, "5 times")])
def test_what_is_not_called_once_is_refused(times: int, said: str) -> None:
    with pytest.raises(
        ValueError, match=f'^"a.b" is called {said} in a forward pass; choose a module that is called once$'
    ):
        only_call([None] * times, "a.b")
    assert only_call([5], "a.b") == 5


def test_a_block_that_is_called_twice_is_refused() -> None:
    shared = PolyNL(3)
    model = nn.Sequential(shared, shared)
    with untouched(model), pytest.raises(ValueError, match=r'^"0" is called 2 times'):
        capture(model, torch.zeros(1, 3, 4, 4), modules=[block_of(model)])


def test_a_block_that_is_never_called_is_refused() -> None:
    model = classifier()
    model.spare = nn.Module()
    model.spare.forward = lambda x: x
    model.spare.block = PolyNL(3)
    with pytest.raises(ValueError, match=r'^"spare.block" is called never'):
        capture(model, torch.zeros(1, 3, 4, 4), modules=[block_of(model)])


# Names of blocks


def two_blocks() -> nn.Module:
    model = polynl.insert(classifier(), "conv", before="norm", after="norm", channels=4)
    return polynl.insert(model, lambda channels: nn.Conv2d(channels, channels, 1), before="conv", channels=4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, "norm.polynl_before"),
        ("norm", "norm.polynl_before"),  # the first of two
        ("norm.polynl_after", "norm.polynl_after"),
        ("conv", "conv.polynl_before"),
        ("conv.polynl_before", "conv.polynl_before"),
    ],
)
def test_blocks_are_called_by_their_names_or_places(name: str | None, expected: str) -> None:
    assert block_of(two_blocks(), name) == expected


def test_blocks_that_nobody_inserted_are_found() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), PolyNL(4)))
    assert block_of(model) == block_of(model, "1.1") == "1.1"
    assert block_of(PolyNL(4)) == ""
    alone = polynl.insert(nn.Conv2d(3, 4, 1), "poly_nl", after="")
    assert block_of(alone) == block_of(alone, "") == "polynl_after"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "norm.polynl_befor",
            r"'norm.polynl_befor'\. Did you mean norm\.polynl_before or .*\? Available: norm\.poly",
        ),
        (
            "stem",
            r"^no block is called 'stem'\. Available: norm.polynl_before, norm.polynl_after, conv.polynl_b",
        ),
        ("", r"^no block is called ''\. Available"),
        ("covn", r"Did you mean conv"),
    ],
)
def test_names_of_no_block_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        block_of(two_blocks(), name)


def test_the_empty_name_is_no_name_of_a_block_inside() -> None:
    with pytest.raises(ValueError, match=r"no block is called ''. Available: 0$"):
        block_of(nn.Sequential(PolyNL(4)), "")


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Sequential has no block; add one with polynl.insert$"):
        block_of(classifier())
