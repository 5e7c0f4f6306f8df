"""Patches to train on: boxes stay where the faces are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polynl.config import configured
from polynl.tasks.face_detection.transforms import FacePatch, PatchConfig

HEIGHT, WIDTH = 90, 120
Box = tuple[int, int, int, int]


def marked(box: Box) -> tuple[Tensor, Tensor]:
    """A dark image with a white rectangle for a face."""
    image = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    left, top, right, bottom = box
    image[:, top:bottom, left:right] = 255
    return image, torch.tensor([box])


def bounds(image: Tensor) -> list[int]:
    """Of what is more white than black."""
    rows, columns = torch.where(image[0] > 127)
    return [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]


def plain(size: int = 64, **options: Any) -> FacePatch:
    further = {name: options.pop(name) for name in ("flip", "attempts") if name in options}
    return FacePatch(PatchConfig(size=size, **{"distort": 0.0, **options}), **{"flip": 0.0, **further})


# Patches


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("size", [33, 64, 200])
@pytest.mark.parametrize("scale", [(0.3, 1.0), (1.0, 1.0)])
def test_boxes_bound_the_pixels(scale: tuple[float, float], size: int, flip: float) -> None:
    torch.manual_seed(0)
    image, boxes = marked((50, 31, 63, 48))
    for _ in range(30):
        patch, (box,) = plain(size, scale=scale, flip=flip)(image, boxes)
        assert patch.shape == (3, size, size)
        assert type(patch) is type(box) is Tensor
        assert (patch.dtype, box.dtype) == (torch.uint8, torch.float32)
        assert (box - torch.tensor(bounds(patch))).abs().max() <= 1, (box, bounds(patch))


def test_whole_numbers_in_boxes_do_not_stay_so() -> None:
    image, boxes = marked((10, 10, 21, 23))
    assert boxes.dtype == torch.int64
    _, (box,) = plain(64, scale=(1.0, 1.0), attempts=200)(image, boxes)
    sides = (box[2:] - box[:2]).tolist()
    assert sides == pytest.approx([11 * 64 / 90, 13 * 64 / 90], abs=1e-4)


def test_a_face_is_in_a_patch_if_its_centre_is(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    inside = [[20.0, 20, 40, 40], [0, 0, 21, 21], [64, 30, 74, 40], [0, 0, 120, 90]]
    outside = [[0.0, 0, 19, 60], [0, 0, 60, 19], [66, 30, 76, 40], [30, 66, 40, 76], [100, 80, 110, 85]]
    # Centres on the left and upper edge belong to a patch, those on the others to its neighbour.
    edges = {(5.0, 5.0, 15.0, 15.0): True, (65.0, 30.0, 75.0, 40.0): False, (30.0, 65.0, 40.0, 75.0): False}
    boxes = torch.tensor([*inside, *outside, *edges])
    # A patch of side 60 from (10, 10) on.
    monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(10))
    _, found = plain(120, scale=(2 / 3, 2 / 3))(image, boxes)
    expected = [[20.0, 20, 60, 60], [0, 0, 22, 22], [108, 40, 120, 60], [0, 0, 120, 120], [0, 0, 10, 10]]
    assert found.tolist() == expected, "clipped to the patch, in its pixels"


def test_patches_are_of_all_sizes_and_places() -> None:
    torch.manual_seed(0)
    # The value of a pixel is its place.
    image = torch.arange(WIDTH).expand(3, HEIGHT, WIDTH).byte().clone()
    image[1] = torch.arange(HEIGHT)[:, None]
    sides, lefts, tops = [], [], []
    for _ in range(400):
        patch, _ = plain(90, scale=(0.3, 0.9))(image, torch.empty(0, 4))
        lefts.append(int(patch[0, 0, 0]))
        tops.append(int(patch[1, 0, 0]))
        sides.append(int(patch[0, 0, -1]) - lefts[-1] + 1)
        assert abs(int(patch[1, -1, 0]) - tops[-1] + 1 - sides[-1]) <= 1, "square"
    assert min(sides) == pytest.approx(27, abs=1)
    assert max(sides) == pytest.approx(81, abs=1)
    assert sum(sides) / 400 == pytest.approx(54, abs=3)
    assert (min(lefts), min(tops)) == (0, 0)
    assert max(left + side for left, side in zip(lefts, sides, strict=True)) >= WIDTH - 1
    assert max(top + side for top, side in zip(tops, sides, strict=True)) >= HEIGHT - 1


def test_a_patch_without_a_face_is_drawn_again() -> None:
    image, boxes = marked((12, 12, 18, 18))

    def found(attempts: int) -> int:
        torch.manual_seed(0)
        patch = plain(16, scale=(0.3, 0.5), attempts=attempts)
        return sum(len(patch(image, boxes)[1]) for _ in range(40))

    counts = [found(attempts) for attempts in (1, 6, 1000)]
    assert counts[0] < counts[1] < counts[2] == 40
    assert counts[0] < 10, "and in the end one without is taken"


def test_small_faces_are_left_out_on_demand() -> None:
    image = torch.zeros(3, 60, 60, dtype=torch.uint8)
    boxes = torch.tensor([[0.0, 0, 10, 30], [20, 0, 24, 40], [30, 5, 30, 9], [40, 0, 45, 5]])
    whole = {"scale": (1.0, 1.0)}
    for least, kept in ((0.0, [0, 1, 3]), (8.0, [0, 1, 3]), (9.0, [0, 3]), (20.0, [0]), (20.5, [])):
        _, found = plain(120, **whole, min_face=least)(image, boxes)
        assert torch.equal(found, 2 * boxes[kept]), "by the shorter side, resized; nothing has no side"


def test_small_is_what_is_left_of_a_face_in_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    # A patch of side 60 from (10, 10) on has 6 of the first box's 10 columns, 12 once resized.
    boxes = torch.tensor([[64.0, 30, 74, 40], [30, 30, 40, 40]])
    monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(10))
    for least, kept in ((12.0, [0, 1]), (12.5, [1])):
        _, found = plain(120, scale=(2 / 3, 2 / 3), min_face=least)(image, boxes)
        expected = torch.tensor([[108.0, 40, 120, 60], [40, 40, 60, 60]])[kept]
        assert torch.equal(found, expected)


def test_images_of_any_shape_and_without_faces() -> None:
    for height, width in ((1, 1), (2, 300), (300, 2), (50, 50)):
        image, boxes = FacePatch(PatchConfig(size=32))(
            torch.zeros(3, height, width, dtype=torch.uint8), torch.empty(0, 4)
        )
        assert image.shape == (3, 32, 32)
        assert (boxes.shape, boxes.dtype) == ((0, 4), torch.float32)


def test_patches_follow_torch_seeds() -> None:
    image = torch.randint(256, (3, HEIGHT, WIDTH), dtype=torch.uint8)
    boxes = torch.tensor([[30.0, 30, 60, 60]])

    def drawn(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return FacePatch(PatchConfig(size=32))(image, boxes)

    for one, again in zip(drawn(0), drawn(0), strict=True):
        assert torch.equal(one, again)
    assert not torch.equal(drawn(0)[0], drawn(1)[0])
    assert torch.equal(boxes, torch.tensor([[30.0, 30, 60, 60]])), "what is given stays as it was"


def test_half_of_the_patches_are_mirrored_and_colours_distorted() -> None:
    torch.manual_seed(0)
    image, boxes = marked((10, 0, 30, 90))
    image[1:] //= 2
    whole = FacePatch(PatchConfig(size=90, scale=(1.0, 1.0), distort=0.0))
    image = image[:, :, :90]
    sides = [whole(image, boxes)[1][0, 0].item() for _ in range(200)]
    assert set(sides) == {10.0, 60.0}
    assert 70 < sides.count(10.0) < 130
    coloured = FacePatch(PatchConfig(size=90, scale=(1.0, 1.0), distort=1.0), flip=0.0)
    patches = [coloured(image, boxes) for _ in range(5)]
    assert len({tuple(patch[:, 5, 20].tolist()) for patch, _ in patches}) == 5
    assert all(found.tolist() == [[10, 0, 30, 90]] for _, found in patches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, r"size: expected greater than 0 \(got 0\)"),
        ({"scale": (0.0, 1.0)}, r"scale: expected \[from, to\] with 0 < from <= to <= 1; got \[0.0, 1.0\]"),
        ({"scale": (0.8, 0.5)}, r"scale: expected \[from, to\] .* got \[0.8, 0.5\]"),
        ({"scale": (0.3, 1.5)}, r"scale: expected \[from, to\] .* got \[0.3, 1.5\]"),
        ({"min_face": -1.0}, r"min_face: expected greater than or equal to 0 \(got -1.0\)"),
        ({"min_face": math.nan}, r"min_face: expected a finite number \(got nan\)"),
        ({"distort": -0.5}, r"distort: expected greater than or equal to 0 \(got -0.5\)"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        configured(PatchConfig, **options)
