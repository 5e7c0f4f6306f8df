"""Mask R-CNN: torchvision's own, to the bit, until the block in it has learned something."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn
from torchvision.models.detection._utils import overwrite_eps
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FrozenBatchNorm2d

from polynl import inserted
from polynl.models.resnet import resnet
from polynl.tasks.instance_segmentation.model import mask_rcnn

# Untrained networks are sure of nothing, so all that they find is kept.
SIZES: dict[str, Any] = {"min_size": 64, "max_size": 64}
SMALL: dict[str, Any] = {
    "box_score_thresh": 0.0,
    "box_detections_per_img": 5,
    "rpn_pre_nms_top_n_test": 20,
    "rpn_post_nms_top_n_test": 10,
}
NARROW: dict[str, Any] = {"fpn_channels": 16, "box_width": 16, "mask_widths": (8,)}


def small(arch: str = "resnet18", **options: Any) -> MaskRCNN:
    return mask_rcnn(arch, num_classes=4, detector_options=SMALL, **{**SIZES, **NARROW, **options})


def randomise(model: nn.Module) -> None:
    """Every parameter and buffer, norms too: a network whose parts all have a say."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var"):
                value.uniform_(0.5, 2.0)
            elif value.is_floating_point() and value.ndim == 1:
                value.add_(0.1 * torch.randn_like(value))


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3, 50, 64, generator=generator), torch.rand(3, 64, 40, generator=generator)]


def found(model: nn.Module) -> list[dict[str, Tensor]]:
    with torch.no_grad():
        return model.eval()(images())


def same(found: Iterable[dict[str, Tensor]], expected: Iterable[dict[str, Tensor]]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    assert all(len(wanted["boxes"]) == 5 for _, wanted in pairs), "there is something to compare"
    return all(torch.equal(one[key], wanted[key]) for one, wanted in pairs for key in wanted)


def training_batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    boxes = torch.tensor([[5.0, 5.0, 30.0, 35.0], [20.0, 10.0, 38.0, 48.0]])
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[0, 5:35, 5:30] = masks[1, 10:48, 20:38] = 1
    target = {"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks}
    return [torch.rand(3, 64, 64) for _ in range(2)], [target, target]


@pytest.fixture(scope="module")
def host() -> MaskRCNN:
    """torchvision's own, with frozen norms as with weights, and values that are not those of the start."""
    torch.manual_seed(0)
    model = MaskRCNN(resnet_fpn_backbone(backbone_name="resnet50", weights=None), 4, **SIZES, **SMALL)
    names = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).state_dict().keys()
    assert model.state_dict().keys() == {name for name in names if "num_batches" not in name}
    randomise(model)
    return model.eval()


@pytest.fixture(scope="module")
def weights(host: MaskRCNN, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "mask_rcnn.pth"
    torch.save(host.state_dict(), path)
    return path


def built(weights: Path, **options: Any) -> MaskRCNN:
    return mask_rcnn(num_classes=4, weights=weights, detector_options=SMALL, **SIZES, **options)


@pytest.mark.parametrize(
    ("block", "placement"),
    [(None, "res4"), ("poly_nl", "res345"), ("poly_nl", ["backbone.fpn.layer_blocks.0", "res3"])],
)
def test_detections_are_those_of_torchvision(
    host: MaskRCNN, weights: Path, block: str | None, placement: str | list[str]
) -> None:
    model = built(weights, block=block, placement=placement)
    assert len(inserted(model)) == (0 if block is None else 3 if placement == "res345" else 2)
    assert same(found(model), found(host))
    if block is not None:
        for one in inserted(model).values():
            nn.init.constant_(one.beta, 0.5)  # type: ignore[arg-type]
        assert not same(found(model), found(host))


def test_the_first_coco_weights_have_norms_without_eps(host: MaskRCNN, weights: Path) -> None:
    frozen = deepcopy(host)
    overwrite_eps(frozen, 0.0)
    assert same(found(built(weights, norm_eps=0.0)), found(frozen))
    assert not same(found(host), found(frozen))


OLDER_NAMES = (
    (r"(fpn\.(?:inner|layer)_blocks\.\d)\.0\.", r"\1."),
    (r"rpn\.head\.conv\.0\.0\.", "rpn.head.conv."),
    (r"mask_head\.(\d)\.0\.", lambda match: f"mask_head.mask_fcn{int(match[1]) + 1}."),
)


def test_files_with_the_names_of_older_versions(host: MaskRCNN, tmp_path: Path) -> None:
    """As torchvision's published files have them."""
    state = {}
    for name, value in host.state_dict().items():
        for pattern, older in OLDER_NAMES:
            name = re.sub(pattern, older, name)
        if "num_batches_tracked" not in name:
            state[name] = value
    assert {"rpn.head.conv.weight", "roi_heads.mask_head.mask_fcn4.bias"} < state.keys()
    assert "backbone.fpn.inner_blocks.3.weight" in state
    torch.save(state, tmp_path / "older.pth")
    assert same(found(built(tmp_path / "older.pth", block="poly_nl")), found(host))
    del state["rpn.head.conv.weight"]
    torch.save(state, tmp_path / "older.pth")
    with pytest.raises(ValueError, match=r"missing: rpn\.head\.conv\.0\.0\.weight$"):
        built(tmp_path / "older.pth")
    state["rpn.head.conv.weight"] = torch.zeros(1)
    torch.save(state, tmp_path / "older.pth")
    with pytest.raises(ValueError, match=r"size mismatch for rpn\.head\.conv\.0\.0\.weight"):
        built(tmp_path / "older.pth")


def test_weights_for_other_classes(weights: Path) -> None:
    heads = ("roi_heads.box_predictor", "roi_heads.mask_predictor.mask_fcn_logits")
    with pytest.raises(
        ValueError, match=r"these shapes differ: roi_heads\.box_predictor\.bbox_pred\.bias is \(16,\)"
    ):
        mask_rcnn(num_classes=7, weights=weights)
    model = mask_rcnn(num_classes=7, weights=weights, weights_without=heads)
    state = torch.load(weights, weights_only=True)
    assert torch.equal(model.roi_heads.box_head.fc6.weight, state["roi_heads.box_head.fc6.weight"])
    assert model.roi_heads.box_predictor.cls_score.out_features == 7
    with pytest.raises(
        ValueError, match=r"weights_without: the MaskRCNN has no weights below 'roi_heads.box'"
    ):
        mask_rcnn(num_classes=7, weights=weights, weights_without=["roi_heads.box"])
    with pytest.raises(ValueError, match=r"these shapes differ: roi_heads\.mask_predictor"):
        mask_rcnn(num_classes=7, weights=weights, weights_without=heads[:1])


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("res3", {"backbone.body.layer2.3": 512}),
        ("res4", {"backbone.body.layer3.5": 1024}),
        ("res5", {"backbone.body.layer4.2": 2048}),
        (
            "res345",
            {"backbone.body.layer2.3": 512, "backbone.body.layer3.5": 1024, "backbone.body.layer4.2": 2048},
        ),
        ("backbone.body.layer1.0", {"backbone.body.layer1.0": 64}),
        ("roi_heads.mask_head", {"roi_heads.mask_head.0.0": 16}),
    ],
)
def test_the_papers_placements_and_any_module(placement: str, expected: dict[str, int]) -> None:
    model = small("resnet50", block="conv", placement=placement)
    widths = {name: block.channels for name, block in inserted(model).items()}
    assert widths == {f"{name}.polynl_before": width for name, width in expected.items()}


@pytest.mark.parametrize("stages", range(6))
def test_stages_are_frozen_as_torchvision_does(stages: int) -> None:
    theirs = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=stages)
    ours = small(trainable_stages=stages, block="poly_nl", placement="res3").backbone
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    blocks = {name for name in trained if "polynl" in name}
    assert len(blocks) == 5, "a block is trained also in a frozen stage"
    assert trained - blocks == {
        name for name, parameter in theirs.named_parameters() if parameter.requires_grad
    }


def test_without_weights_all_is_trained_and_with_them_three_stages(tmp_path: Path) -> None:
    assert all(parameter.requires_grad for parameter in small().parameters())
    torch.save(resnet("resnet18").state_dict(), tmp_path / "resnet18.pth")
    body = small(backbone_weights=tmp_path / "resnet18.pth").backbone.body
    frozen = {name.split(".")[0] for name, value in body.named_parameters() if not value.requires_grad}
    assert frozen == {"conv1", "layer1"}


def test_weights_of_a_detector_are_none_of_its_resnet(weights: Path) -> None:
    with pytest.raises(ValueError, match=r"backbone_weights: .* does not fit the ResNet of the detector"):
        mask_rcnn(num_classes=4, backbone_weights=weights)


def test_weights_of_the_resnet_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = resnet("resnet18", block="poly_nl", num_classes=7, options={"init": "random"})
    randomise(classifier)
    torch.save(classifier.state_dict(), tmp_path / "resnet18.pth")
    body = small(block="poly_nl", backbone_weights=tmp_path / "resnet18.pth").backbone.body.eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        last = classifier.eval().get_submodule("layer4")
        seen: list[Tensor] = []
        last.register_forward_hook(lambda module, args, output: seen.append(output))
        classifier(x)
        # One norm divides by a root, the other multiplies by its inverse.
        torch.testing.assert_close(body(x)["3"], seen[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm2d), ("sync", nn.SyncBatchNorm)])
def test_norms_of_the_resnet(norm: str, kind: type[nn.Module]) -> None:
    frozen = small(block="non_local", norm="frozen", arch="resnet50")
    assert isinstance(frozen.backbone.body.bn1, FrozenBatchNorm2d)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in frozen.backbone.body.layer1.modules())
    assert isinstance(small(norm=norm).backbone.body.layer4[0].bn2, kind)


def test_norms_of_the_block_are_synchronised_with_the_others_and_never_frozen() -> None:
    def norms(norm: str) -> set[type[nn.Module]]:
        model = small("resnet18", block="latent_gnn", norm=norm)
        (block,) = inserted(model).values()
        return {type(module) for module in block.modules() if "BatchNorm" in type(module).__name__}

    assert norms("sync") == {nn.SyncBatchNorm}
    assert norms("frozen") == norms("batch") == {nn.BatchNorm1d}


def test_gradients_reach_a_block_in_a_frozen_stage() -> None:
    torch.manual_seed(0)
    model = small(block="poly_nl", options={"init": "random"}, trainable_stages=0).train()
    losses = model(*training_batch())
    assert set(losses) == {
        f"loss_{part}" for part in ("classifier", "box_reg", "mask", "objectness", "rpn_box_reg")
    }
    sum(losses.values()).backward()
    (block,) = inserted(model).values()
    assert all(parameter.grad.any() for parameter in block.parameters())
    assert model.backbone.body.layer4[1].conv2.weight.grad is None


def test_a_new_block_learns_from_the_first_step() -> None:
    """With β = 0 it is the identity, and β has a gradient."""
    torch.manual_seed(0)
    model = small(block="poly_nl").train()
    sum(model(*training_batch()).values()).backward()
    (block,) = inserted(model).values()
    assert block.beta.grad.any()


def test_a_small_resnet_has_a_map_for_each_of_its_resolutions() -> None:
    model = small("small_resnet", anchor_sizes=(8, 16, 32), arch_options={"width": 4}, norm="batch")
    maps = model.backbone.eval()(torch.randn(1, 3, 64, 64))
    assert {name: tuple(value.shape[1:]) for name, value in maps.items()} == {
        "0": (16, 32, 32),
        "1": (16, 16, 16),
        "pool": (16, 8, 8),
    }
    assert all(len(one["boxes"]) == 5 for one in found(model))


def test_anchors_and_levels_are_as_asked_for() -> None:
    model = small(anchor_sizes=(8, 16, 32, 64, 128), roi_scale=56)
    areas = [(cell[:, 2:] - cell[:, :2]).prod(1) for cell in model.rpn.anchor_generator.cell_anchors]
    for area, side in zip(areas, (8, 16, 32, 64, 128), strict=True):
        torch.testing.assert_close(area, torch.full((3,), side**2.0), rtol=0.2, atol=0)
    assert model.roi_heads.box_roi_pool.canonical_scale == 56
    assert model.roi_heads.mask_roi_pool.canonical_scale == 56


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"anchor_sizes": (8, 16)}, r"anchor_sizes=\[8\.0, 16\.0\]: expected 5 numbers, one for each level"),
        ({"trainable_stages": 6}, "trainable_stages=6: expected a number from 0 to 5"),
        ({"trainable_stages": -1}, r"trainable_stages: expected greater than or equal to 0 \(got -1\)"),
        ({"norm": "batch", "norm_eps": 0.0}, "norm_eps=0.0 is for frozen norms, and these are 'batch'"),
        ({"block": "poly_nl", "placement": "res6"}, "placement must be one of res3, .* got 'res6'"),
        ({"block": "poly_nl", "placement": "layer3.1"}, "or the name of a module, got 'layer3.1'"),
        ({"block": "poly_nl", "placement": "transform"}, r'no block can go before "transform"'),
        ({"arch": "vgg16"}, "arch: no network is called 'vgg16'"),
        ({"box_with": 16}, r"box_with: there is no such option\. Did you mean box_width"),
    ],
)
def test_mistakes(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        small(**options)


@pytest.mark.parametrize(
    ("option", "own"),
    [
        ("backbone", "arch"),
        ("min_size", "min_size"),
        ("max_size", "max_size"),
        ("rpn_anchor_generator", "anchor_sizes"),
        ("box_roi_pool", "roi_scale"),
        ("box_head", "box_width"),
        ("box_predictor", "box_width"),
        ("mask_roi_pool", "roi_scale"),
        ("mask_head", "mask_widths"),
        ("mask_predictor", "mask_widths"),
    ],
)
def test_options_that_are_ours_to_set(option: str, own: str) -> None:
    message = f"^detector_options: polynl sets {option} of MaskRCNN itself; use {own} instead$"
    with pytest.raises(ValueError, match=message):
        mask_rcnn("resnet18", detector_options={**SMALL, option: None})


def test_a_head_for_proposals_is_as_given() -> None:
    head = RPNHead(16, 3, conv_depth=2)
    model = mask_rcnn("resnet18", **NARROW, detector_options={"rpn_head": head})
    assert model.rpn.head is head


def test_options_without_a_block() -> None:
    with pytest.raises(ValueError, match="options: options without a block: reduction"):
        small(options={"reduction": 2})


def masks_seen(model: nn.Module) -> list[Tensor | None]:
    """What the blocks get as masks, filled as the model runs."""
    seen: list[Tensor | None] = []
    for block in inserted(model).values():
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs.get("mask")), with_kwargs=True
        )
    return seen


def test_the_block_ignores_padding_in_training_and_in_scoring() -> None:
    model = small(block="poly_nl", placement=["res3", "res4"], max_size=96)
    seen = masks_seen(model)
    (square, other), targets = training_batch()
    targets[1] = {**targets[1], "masks": targets[1]["masks"][:, :, :40]}
    losses = model.train()([square, other[:, :, :40]], targets)  # 64 × 64, and 96 × 60 after resizing
    sum(losses.values()).backward()
    sizes = [None if mask is None else mask.sum((1, 2)).tolist() for mask in seen]
    assert sizes == [[8 * 8, 12 * 8], [4 * 4, 6 * 4]]
    found(model)
    assert [mask is not None for mask in seen] == [True] * 4


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({"block": "poly_nl", "ignore_padding": False}, False),
        ({"block": "poly_nl", "ignore_padding": "everywhere"}, True),
        ({"block": "tesa"}, False),
    ],
)
def test_padding_is_ignored_where_the_recipe_and_the_block_allow_it(
    options: dict[str, Any], masked: bool
) -> None:
    model = small(**options)
    seen = masks_seen(model)
    found(model)
    assert [mask is not None for mask in seen] == [masked]


def test_tesa_cannot_ignore_padding_everywhere() -> None:
    with pytest.raises(ValueError, match="TESA takes no mask"):
        small(block="tesa", ignore_padding="everywhere")
