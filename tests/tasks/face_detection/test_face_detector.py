"""The face detector: RetinaNet's parts, with anchors, matching and losses as the paper has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import RetinaNet
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou, distance_box_iou_loss, sigmoid_focal_loss

from polynl import inserted
from polynl.tasks.face_detection import model as matching
from polynl.tasks.face_detection.model import IGNORED, NEGATIVE, FaceDetector, face_detector, matched

# An untrained network is sure of nothing, so all that it finds is kept.
UNSURE = {"score_thresh": 0.0, "detections_per_img": 5}
SIZES = {"min_size": 64, "max_size": 96}


def small(arch: str = "resnet18", **options: Any) -> FaceDetector:
    return face_detector(arch, **{"fpn_channels": 8, "detector_options": UNSURE, **SIZES, **options})


def boxes(count: int, *, seed: int = 0, room: float = 100.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corners = room * torch.rand(count, 2, generator=generator)
    return torch.cat([corners, corners + 1 + 30 * torch.rand(count, 2, generator=generator)], 1)


def batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two faces, and an image with none."""
    faces = torch.tensor([[5.0, 5.0, 20.0, 25.0], [30.0, 20.0, 44.0, 40.0]])
    return [torch.rand(3, 64, 64), torch.rand(3, 64, 64)], [
        {"boxes": faces, "labels": torch.tensor([0, 0])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]


# Matching


@pytest.mark.parametrize("at_a_time", [1 << 24, 50 * 333, 100])
@pytest.mark.parametrize(("positive", "negative"), [(0.35, 0.35), (0.5, 0.3), (0.9, 0.9)])
def test_matches_are_those_of_torchvision(
    monkeypatch: Any, at_a_time: int, positive: float, negative: float
) -> None:
    monkeypatch.setattr(matching, "MOST_OVERLAPS", at_a_time)
    faces, anchors = boxes(50), boxes(1000, seed=1)
    expected = Matcher(positive, negative, allow_low_quality_matches=True)(box_iou(faces, anchors))
    found = matched(faces, anchors, positive=positive, negative=negative)
    assert torch.equal(found, expected)
    assert {True, False} == set((found >= 0).tolist())


def test_matches_by_hand() -> None:
    faces = torch.tensor([[0.0, 0.0, 10.0, 10.0], [50.0, 50.0, 52.0, 52.0]])
    anchors = torch.tensor(
        [[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 20.0], [0.0, 0.0, 10.0, 28.0], [40.0, 40.0, 60.0, 60.0]]
    )
    # IoU with the first face 1, 1/2, 5/14; nothing but the last anchor touches the second face.
    assert matched(faces, anchors, positive=0.6, negative=0.4).tolist() == [0, IGNORED, NEGATIVE, 1]
    assert matched(faces, anchors, positive=0.35, negative=0.35).tolist() == [0, 0, 0, 1]


def test_a_face_that_no_anchor_touches_takes_none() -> None:
    far = torch.tensor([[0.0, 0.0, 10.0, 10.0], [900.0, 900.0, 910.0, 910.0]])
    anchors = torch.tensor([[0.0, 0.0, 10.0, 10.0], [200.0, 200.0, 210.0, 210.0]])
    assert matched(far, anchors, positive=0.35, negative=0.35).tolist() == [0, NEGATIVE]


def test_no_face() -> None:
    assert matched(torch.zeros(0, 4), boxes(3), positive=0.35, negative=0.35).tolist() == [NEGATIVE] * 3


def test_thousands_of_faces_take_bounded_memory(monkeypatch: Any) -> None:
    sizes: list[int] = []

    def spy(first: Tensor, second: Tensor) -> Tensor:
        sizes.append(len(first) * len(second))
        return box_iou(first, second)

    monkeypatch.setattr(matching, "box_iou", spy)
    monkeypatch.setattr(matching, "MOST_OVERLAPS", 1 << 18)
    faces = boxes(2000, room=600)
    found = matched(faces, boxes(3000, seed=1, room=600), positive=0.35, negative=0.35)
    assert max(sizes) <= 1 << 18
    assert sum(sizes) == 2 * 2000 * 3000
    assert (found >= 0).any()


# The network


def test_three_anchors_taller_than_wide_on_every_level() -> None:
    model = small(levels=(2, 3, 4, 5, 6), anchor_scale=4)
    cells = model.anchor_generator.cell_anchors
    assert len(cells) == 5
    for level, cell in enumerate(cells, 2):
        width, height = (cell[:, 2:] - cell[:, :2]).unbind(1)
        torch.testing.assert_close(height / width, torch.full((3,), 1.3))
        sides = 4 * 2**level * torch.tensor([1, 2 ** (1 / 3), 2 ** (2 / 3)])
        torch.testing.assert_close((width * height).sqrt(), sides)


def test_anchors_are_where_they_were_in_training_whatever_the_size() -> None:
    """Each level's are a stride apart; padding to 32 would squeeze those of stride 64 on most images."""
    model = face_detector("resnet18", fpn_channels=8, min_size=110, max_size=165).eval()
    found: list[Tensor] = []
    model.anchor_generator.register_forward_hook(lambda module, args, output: found.extend(output))
    with torch.no_grad():
        model([torch.rand(3, 110, 165)])
    centres = ((found[0][:, :2] + found[0][:, 2:]) / 2)[-3 * 2 * 3 :]
    assert sorted({tuple(centre) for centre in centres.round().tolist()}) == [
        (64.0 * x, 64.0 * y) for x in range(3) for y in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boxes_are_in_float32_under_autocast(dtype: torch.dtype) -> None:
    """16 bits have steps of whole pixels in large images."""
    torch.manual_seed(0)
    model = small(levels=(2, 3, 4, 5)).train()
    images, targets = batch()
    anchors: list[list[Tensor]] = []
    model.anchor_generator.register_forward_hook(lambda module, args, output: anchors.append(output))
    exact = {name: loss.item() for name, loss in model(images, targets).items()}
    with torch.autocast("cpu", dtype):
        losses = model(images, targets)
        found = model.eval()(images)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(exact, rel=0.02)
    assert all(one["boxes"].dtype == one["scores"].dtype == torch.float32 for one in found)
    assert torch.equal(anchors[1][0], anchors[0][0]), "rounded anchors would move every box"


@pytest.mark.parametrize(
    ("arch", "levels", "expected"),
    [
        ("resnet18", (2, 3, 4, 5, 6), [32, 16, 8, 4, 2]),
        ("resnet18", (3, 4, 5, 6, 7), [16, 8, 4, 2, 1]),
        ("resnet18", (2, 3, 4, 5), [32, 16, 8, 4]),
        ("small_resnet", (1, 2, 3), [64, 32, 16]),
        ("small_resnet", (2,), [32]),
    ],
)
def test_levels(arch: str, levels: tuple[int, ...], expected: list[int]) -> None:
    model = small(arch, levels=levels).eval()
    maps = model.backbone(torch.randn(1, 3, 128, 128))
    assert [value.shape[-1] for value in maps.values()] == expected
    assert {value.shape[1] for value in maps.values()} == {8}
    assert model.anchor_generator.num_anchors_per_location() == [3] * len(levels)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"levels": ()}, r"levels=\[\]: expected consecutive numbers"),
        ({"levels": (2, 4, 5)}, r"levels=\[2, 4, 5\]: expected consecutive numbers"),
        ({"levels": (1, 2, 3, 4, 5)}, r"resnet18 has 2, 3, 4, 5; start with one of them"),
        ({"levels": (2, 3)}, r"levels=\[2, 3\]: resnet18 has 2, 3, 4, 5; .* end with 5 or higher"),
        ({"positive_iou": 0.3, "negative_iou": 0.5}, "negative_iou=0.5: expected at most positive_iou=0.3"),
        ({"positive_iou": 35}, r"positive_iou: expected less than or equal to 1 \(got 35\)"),
        ({"anchor_scale": 0}, r"anchor_scale: expected greater than 0 \(got 0\)"),
    ],
)
def test_mistakes(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        small(**options)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("backbone", "use arch instead"),
        ("num_classes", "leave it out"),
        ("anchor_generator", "use anchor_scale instead"),
        ("head", "use fpn_channels instead"),
        ("proposal_matcher", "use positive_iou instead"),
        ("fg_iou_thresh", "use positive_iou instead"),
        ("bg_iou_thresh", "use negative_iou instead"),
        ("size_divisible", "use levels instead"),
        ("_skip_resize", "leave it out"),
    ],
)
def test_options_that_are_ours_to_set(option: str, instead: str) -> None:
    message = f"^detector_options: polynl sets {option} of RetinaNet itself; {instead}$"
    with pytest.raises(ValueError, match=message):
        small(detector_options={**UNSURE, option: None})


def test_a_new_block_changes_nothing_until_it_has_learned() -> None:
    torch.manual_seed(0)
    plain = small(norm="frozen").eval()
    model = small(norm="frozen", block="poly_nl", placement="res345").eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    images, _ = batch()
    with torch.no_grad():
        expected = plain(images)
        assert all(len(one["boxes"]) == 5 for one in expected)
        assert all(
            torch.equal(one[key], wanted[key])
            for one, wanted in zip(model(images), expected, strict=True)
            for key in wanted
        )
        for block in inserted(model).values():
            torch.nn.init.constant_(block.beta, 0.5)  # type: ignore[arg-type]
        assert not torch.equal(model(images)[0]["scores"], expected[0]["scores"])


def test_weights_of_a_file(tmp_path: Path) -> None:
    model = small(block="poly_nl", options={"init": "random"})
    torch.save(model.state_dict(), tmp_path / "faces.pth")
    again = small(block="poly_nl", weights=tmp_path / "faces.pth")
    # The norms of what is frozen have no counter.
    state = {name: value for name, value in model.state_dict().items() if name in again.state_dict()}
    assert all(name.endswith("num_batches_tracked") for name in model.state_dict().keys() - state.keys())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in state.items())
    frozen = {name.split(".")[2] for name, value in again.named_parameters() if not value.requires_grad}
    assert frozen == {"conv1", "layer1"}
    assert all(value.requires_grad for value in model.parameters()), "from scratch, norms and all"


def test_frozen_stages_keep_their_statistics() -> None:
    model = small(trainable_stages=3, norm="batch").train()
    images, targets = batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(images, targets)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    parts = {name.split(".")[2] for name in changed if name.startswith("backbone.body")}
    assert parts == {"layer2", "layer3", "layer4"}


def test_training_takes_images_as_they_are_and_detection_resizes_them() -> None:
    model = face_detector("resnet18", fpn_channels=8)
    seen: list[tuple[int, ...]] = []
    model.backbone.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[-2:])))
    images, targets = batch()
    model(images, targets)
    with torch.no_grad():
        model.eval()([torch.rand(3, 60, 80)])
        model([torch.rand(3, 40, 80)])
    # Both sides are padded to multiples of 64: 1100 × 1467, and 825 × 1650.
    assert seen == [(64, 64), (1152, 1472), (832, 1664)]


# Losses


def test_losses_by_hand() -> None:
    torch.manual_seed(0)
    model = small(levels=(2, 3, 4, 5)).train()
    images, targets = batch()
    losses = model(images, targets)
    batch_of_images, _ = model.transform(images)
    maps = list(model.backbone(batch_of_images.tensors).values())
    heads, anchors = model.head(maps), model.anchor_generator(batch_of_images, maps)
    focal, distance = torch.zeros(()), torch.zeros(())
    for number, target in enumerate(targets):
        owner = matched(target["boxes"], anchors[number], positive=0.35, negative=0.35)
        positive = owner >= 0
        logits = heads["cls_logits"][number, :, 0]
        focal = focal + sigmoid_focal_loss(logits, positive.float(), reduction="sum") / max(1, positive.sum())
        if positive.any():
            moved = model.box_coder.decode_single(
                heads["bbox_regression"][number][positive], anchors[number][positive]
            )
            wanted = target["boxes"][owner[positive]]
            distance = distance + distance_box_iou_loss(moved, wanted, reduction="sum") / positive.sum()
    # The batch norms have seen the images twice, with the same statistics.
    torch.testing.assert_close(losses["classification"], focal / 2)
    torch.testing.assert_close(losses["bbox_regression"], distance / 2)
    assert distance > 0


def test_losses_are_those_of_torchvision_with_its_matcher() -> None:
    torch.manual_seed(0)
    model = small(positive_iou=0.5, negative_iou=0.4).train()
    images, targets = batch()
    with torch.no_grad():
        losses = model(images, targets)
        batch_of_images, _ = model.transform(images)
        maps = list(model.backbone(batch_of_images.tensors).values())
        anchors = model.anchor_generator(batch_of_images, maps)
        expected = RetinaNet.compute_loss(model, targets, model.head(maps), anchors)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(
        {name: loss.item() for name, loss in expected.items()}, rel=1e-5
    )


def test_every_parameter_learns_also_from_images_without_faces() -> None:
    """Or processes would wait for each other's gradients."""
    model = small(block="poly_nl", options={"init": "random"}).train()
    images, (_, empty) = batch()
    losses = model(images, [empty, empty])
    assert losses["bbox_regression"] == 0
    assert losses["classification"] > 0
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    images, targets = batch()
    model.zero_grad()
    sum(model(images, targets).values()).backward()
    (block,) = inserted(model).values()
    assert all(parameter.grad.any() for parameter in block.parameters())


def test_the_block_ignores_padding_in_training_and_in_scoring() -> None:
    model, seen = small(block="poly_nl"), list[Any]()
    (block,) = inserted(model).values()
    block.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["mask"].sum((1, 2)).tolist()), with_kwargs=True
    )
    (image, other), targets = batch()
    losses = model.train()([image, other[:, :48]], targets)
    sum(losses.values()).backward()
    model.eval()([image[:, :33], other])  # the first becomes 50 × 96
    assert seen == [[4 * 4, 3 * 4], [4 * 6, 4 * 4]]
