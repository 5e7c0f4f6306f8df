"""A detector's padding: what an image is next to in a batch does not change its features."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from copy import deepcopy
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import polynl
from polynl.insertion.padding import HANDLES, real_positions

# They are not resized, but padded to multiples of 32 even if alone: here at the bottom.
SMALL, LARGE = (41, 62), (41, 93)
STRIDE = 4
WITH_MASKS = ("poly_nl", "non_local", "efficient_nl", "latent_gnn")


class Backbone(nn.Sequential):
    """A host of stride 4, with biases, so that padding does not stay zero."""

    out_channels = 8

    def __init__(self, kernel: int) -> None:
        convs = [
            nn.Conv2d(channels, 8, kernel, stride=stride, padding=kernel // 2)
            for channels, stride in ((3, 2), (8, 1), (8, 1))
        ]
        pool = nn.MaxPool2d(kernel, stride=2, padding=kernel // 2)
        super().__init__(convs[0], pool, nn.Tanh(), convs[1], nn.Tanh(), convs[2])


def detector(
    kernel: int = 1, block: str | Callable[..., nn.Module] | None = "poly_nl", kind: Any = RetinaNet
) -> nn.Module:
    torch.manual_seed(0)
    anchors = AnchorGenerator(((16,),), ((1.0,),))
    sizes = {"image_mean": [0.5] * 3, "image_std": [0.2] * 3}
    if kind is FasterRCNN:
        pool = MultiScaleRoIAlign(["0"], 2, 2)
        sizes |= {"rpn_anchor_generator": anchors, "box_roi_pool": pool, "box_score_thresh": 0.0}
    else:
        sizes["anchor_generator"] = anchors
    model = kind(Backbone(kernel), num_classes=2, min_size=41, max_size=96, **sizes).double().eval()
    if block is not None:
        polynl.insert(model, block, before=["backbone.3", "backbone.5"], channels=8, init="random")
    return model


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3, *size, generator=generator, dtype=torch.float64) for size in (SMALL, LARGE)]


@torch.no_grad()
def features(model: Any, batch: list[Tensor]) -> Tensor:
    """Those of the first image, a small one, at its own positions."""
    found: list[Tensor] = []
    with model.backbone.register_forward_hook(lambda _, args, output: found.append(output)):
        model(batch)
    height, width = (-(-side // STRIDE) for side in SMALL)
    return found[-1][0, :, :height, :width]


def moved(model: nn.Module) -> float:
    """How far the features of an image move when it is batched with a larger one."""
    small, large = images()
    alone, together = features(model, [small]), features(model, [small, large])
    return ((together - alone).norm() / alone.norm()).item()


@pytest.mark.parametrize("block", WITH_MASKS)
def test_features_do_not_depend_on_the_rest_of_the_batch_where_those_of_the_host_do_not(block: str) -> None:
    assert moved(detector(block=None)) < 1e-12, "without kernels of 3, no position sees another"
    model = detector(block=block)
    assert moved(model) > 1e-3
    assert moved(polynl.ignore_padding(model)) < 1e-12
    assert moved(polynl.ignore_padding(model, enabled=False)) > 1e-3


def test_everywhere_convolutions_and_pooling_see_the_border_of_the_image() -> None:
    plain, model = detector(3, block=None), detector(3)
    assert moved(plain) > 1e-3
    assert moved(polynl.ignore_padding(model)) > 1e-3, "the positions at the border count, and they move"
    polynl.ignore_padding(model, everywhere=True)
    assert moved(model) < 1e-12
    assert moved(polynl.ignore_padding(plain, everywhere=True)) < 1e-12


def test_without_padding_nothing_changes() -> None:
    model: Any = detector(3)
    model.transform.min_size = (64,)
    image = torch.rand(3, 64, 64, dtype=torch.float64)
    expected = features(model, [image])
    assert torch.equal(features(polynl.ignore_padding(model, everywhere=True), [image]), expected)


@pytest.mark.parametrize(
    ("size", "padded", "length", "real"),
    [
        (64, 64, 16, 16),
        (61, 64, 16, 16),
        (60, 64, 16, 15),
        (1, 800, 50, 1),
        (768, 800, 13, 12),  # stride 64, of which 800 is no multiple
        (65, 96, 2, 2),
        (64, 96, 2, 1),
        (100, 112, 8, 8),  # stride 14
        (98, 112, 8, 7),
    ],
)
def test_an_image_has_the_positions_that_it_would_have_without_padding(
    size: int, padded: int, length: int, real: int
) -> None:
    mask = real_positions(torch.zeros(2, 1, length, 3), (padded, 3), ((size, 2), (padded, 3)))
    assert mask.shape == (2, length, 3)
    assert mask[0].sum(0).tolist() == [real, real, 0]
    assert mask[1].all()


def test_copies_and_pickles_ignore_padding_too_and_keys_stay() -> None:
    keys = list(detector().state_dict())
    model = polynl.ignore_padding(detector())
    assert list(model.state_dict()) == keys
    small = images()[0]
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert moved(copy) < 1e-12
        for block in polynl.inserted(copy).values():
            nn.init.zeros_(block.beta)  # type: ignore[arg-type]
        assert torch.equal(features(copy, [small]), features(detector(block=None), [small]))
        assert moved(polynl.ignore_padding(copy, enabled=False)) < 1e-12
    assert moved(model) < 1e-12, "the copies have hooks of their own"


def test_removing_the_blocks_leaves_no_hook() -> None:
    model = polynl.ignore_padding(polynl.ignore_padding(detector(3)), everywhere=True)
    polynl.remove(model)
    for module in model.modules():
        assert not [*module._forward_hooks, *module._forward_pre_hooks]
        assert HANDLES not in vars(module)
    assert moved(model) == moved(detector(3, block=None))


def test_parts_that_are_called_by_themselves_know_of_no_padding() -> None:
    model: Any = polynl.ignore_padding(detector())
    batch = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    expected = model.backbone(batch)
    model(images())
    assert torch.equal(model.backbone(batch), expected)
    with model.head.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(images())
    assert torch.equal(model.backbone(batch), expected)


def test_threads_have_batches_of_their_own() -> None:
    model: Any = polynl.ignore_padding(detector())
    expected = features(model, images())

    def disturb(*_: Any) -> None:
        other = Thread(target=lambda: model([torch.rand(3, 32, 32, dtype=torch.float64)]))
        handle.remove()
        other.start()
        other.join()

    handle = model.backbone.register_forward_pre_hook(disturb)
    assert torch.equal(features(model, images()), expected)


def test_the_transform_alone_notes_a_new_batch_too() -> None:
    model: Any = polynl.ignore_padding(detector())
    small, large = images()
    expected = features(model, [small])
    for place, batch in enumerate([[small, large], [large, small]]):
        found = model.backbone(model.transform(batch)[0].tensors)[place]
        torch.testing.assert_close(found[:, : expected.shape[1], : expected.shape[2]], expected)


def test_inserting_a_block_can_ignore_padding_at_once() -> None:
    place = {"before": "backbone.3", "channels": 8, "init": "random", "ignore_padding": True}
    assert moved(polynl.insert(detector(block=None), "poly_nl", **place)) < 1e-12
    model = detector(block=None)
    with pytest.raises(ValueError, match="TESA takes no mask"):
        polynl.insert(model, "tesa", **place)
    assert not polynl.inserted(model)


def test_a_mask_of_the_caller_stays_and_boxes_have_no_padding() -> None:
    model: Any = detector(kind=FasterRCNN)
    polynl.insert(model, "poly_nl", before="roi_heads.box_head", channels=8, init="random")
    polynl.ignore_padding(model)
    masks: list[Any] = []

    def own(block: nn.Module, args: Any, kwargs: Any) -> Any:
        masks.append(kwargs.get("mask"))

    for block in polynl.inserted(model).values():
        block.register_forward_pre_hook(own, with_kwargs=True)
    model(images())
    assert [mask is not None for mask in masks] == [True, True, False]
    model.backbone[3].polynl_before.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {"mask": torch.ones(2, 16, 24)}), with_kwargs=True, prepend=True
    )
    model(images())
    assert masks[3].dtype == torch.float32


def group_norm(channels: int, init: str) -> nn.Module:
    return nn.GroupNorm(2, channels)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            lambda: nn.Conv2d(3, 3, 1),
            {},
            "Conv2d is not a detector of torchvision: it has no",
        ),
        (lambda: detector(block=None), {}, "there is no block to ignore padding: insert one first, or pass"),
        (
            lambda: detector(block="tesa"),
            {},
            "backbone.3.polynl_before cannot ignore padding: TESA takes",
        ),
        (
            lambda: detector(block=group_norm),
            {"everywhere": True},
            "backbone.3.polynl_before cannot ignore padding: only blocks, Conv2d and MaxPool2d can",
        ),
    ],
)
def test_errors_leave_the_model_as_it_was(
    build: Callable[[], nn.Module], options: dict[str, bool], message: str
) -> None:
    model = build()
    with pytest.raises(ValueError, match=re.escape(message)):
        polynl.ignore_padding(model, **options)
    assert not any(HANDLES in vars(module) for module in model.modules())
