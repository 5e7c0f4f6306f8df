"""Detectors of torchvision with blocks in their ResNets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import MultiScaleRoIAlign

from polynl.models.placements import check_options_have_block, insert_at
from polynl.models.pyramids import BODY, Norm, resnet_fpn
from polynl.models.weights import check_left_out, load_weights
from polynl.tasks.face_detection.anchors import matched

Model = TypeVar("Model", bound=nn.Module)
ASPECT_RATIOS = (0.5, 1.0, 2.0)
# Height by width of a face, and how the three anchors of a level are spaced.
FACE_RATIO = 1.3
FACE_SCALES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
# Of MaskRCNN's arguments those that `mask_rcnn` sets, and from which of its own.
OWN_ARGUMENTS = {
    "backbone": "arch",
    "num_classes": "num_classes",
    "rpn_anchor_generator": "anchor_sizes",
    "box_roi_pool": "roi_scale",
    "box_head": "box_width",
    "box_predictor": "box_width",
    "mask_roi_pool": "roi_scale",
    "mask_head": "mask_widths",
    "mask_predictor": "mask_widths",
}
# Of RetinaNet's arguments those that `face_detector` sets, and from which of its own, if any.
FACE_ARGUMENTS = {
    "backbone": "arch",
    "num_classes": None,
    "anchor_generator": "anchor_scale",
    "head": "fpn_channels",
    "proposal_matcher": "positive_iou",
    "fg_iou_thresh": "positive_iou",
    "bg_iou_thresh": "negative_iou",
    "size_divisible": "levels",
    "_skip_resize": None,
}


def mask_rcnn(
    arch: str = "resnet50",
    *,
    num_classes: int = 91,
    block: str | Callable[..., nn.Module] | None = None,
    placement: str | Sequence[str] = "res4",
    weights: str | os.PathLike[str] | None = None,
    weights_without: Sequence[str] = (),
    backbone_weights: str | os.PathLike[str] | None = None,
    trainable_stages: int | None = None,
    norm: Norm = "frozen",
    norm_eps: float | None = None,
    stride_in_1x1: bool = False,
    arch_options: Mapping[str, Any] | None = None,
    fpn_channels: int = 256,
    box_width: int = 1024,
    mask_widths: Sequence[int] = (256, 256, 256, 256),
    anchor_sizes: Sequence[float] = (32, 64, 128, 256, 512),
    roi_scale: int = 224,
    detector_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> MaskRCNN:
    """Mask R-CNN on a ResNet with a feature pyramid, as torchvision's, with a block in it if one is named.

    `arch`, `trainable_stages`, `norm`, `norm_eps`, `stride_in_1x1`, `arch_options`, `fpn_channels`: see
    `polynl.models.pyramids.resnet_fpn`. Without `trainable_stages` all are trained, and three where there are
    weights to start from. `num_classes` counts the background.
    `block` and its `options`: as for `polynl.insert`; a block is trained wherever it is, its own norms, if it
    has any, too.
    `placement`: a key of `PLACEMENTS`, which are in the ResNet, or names of modules of the detector.
    `weights`: a state dict of the detector, torchvision's or a trained one, but for the modules named in
    `weights_without`. `backbone_weights`: one of the ResNet, whose classifier is left out.
    `box_width`, `mask_widths`: channels of the box head's two layers and of the mask head's convolutions.
    `anchor_sizes`: sides in pixels, one for each level of the pyramid.
    `roi_scale`: the side of a box that is looked at on the map of stride 16; twice that is, on the next.
    `detector_options`: further arguments of `torchvision.models.detection.MaskRCNN`, such as `min_size`.

    >>> model = mask_rcnn("resnet18", block="poly_nl", placement="res345", num_classes=3)
    >>> model.backbone.body.layer2[1].polynl_before.channels
    128
    """
    check_options_have_block(block, options)
    further = _further(detector_options, OWN_ARGUMENTS, "mask_rcnn")
    if trainable_stages is None and not (weights is backbone_weights is None):
        trainable_stages = 3
    backbone = resnet_fpn(
        arch,
        channels=fpn_channels,
        trainable_stages=trainable_stages,
        norm=norm,
        norm_eps=norm_eps,
        stride_in_1x1=stride_in_1x1,
        arch_options=arch_options,
    )
    maps = [str(level) for level in range(len(backbone.fpn.inner_blocks))]
    if len(anchor_sizes) != len(maps) + 1:
        raise ValueError(
            f"anchor_sizes={list(anchor_sizes)}: expected {len(maps) + 1} numbers, one for each level"
        )
    model = MaskRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(
            tuple((size,) for size in anchor_sizes), (ASPECT_RATIOS,) * len(anchor_sizes)
        ),
        box_roi_pool=MultiScaleRoIAlign(maps, 7, 2, canonical_scale=roi_scale),
        box_head=TwoMLPHead(fpn_channels * 7**2, box_width),
        box_predictor=FastRCNNPredictor(box_width, num_classes),
        mask_roi_pool=MultiScaleRoIAlign(maps, 14, 2, canonical_scale=roi_scale),
        mask_head=MaskRCNNHeads(fpn_channels, mask_widths, 1),
        mask_predictor=MaskRCNNPredictor(mask_widths[-1], mask_widths[-1], num_classes),
        **further,
    )
    model = _completed(model, block, placement, options, norm)
    _load(model, weights, weights_without, backbone_weights)
    return model


def face_detector(
    arch: str = "resnet50",
    *,
    block: str | Callable[..., nn.Module] | None = None,
    placement: str | Sequence[str] = "res4",
    weights: str | os.PathLike[str] | None = None,
    weights_without: Sequence[str] = (),
    backbone_weights: str | os.PathLike[str] | None = None,
    trainable_stages: int | None = None,
    norm: Norm = "batch",
    norm_eps: float | None = None,
    stride_in_1x1: bool = False,
    arch_options: Mapping[str, Any] | None = None,
    fpn_channels: int = 256,
    levels: Sequence[int] = (2, 3, 4, 5, 6),
    anchor_scale: float = 4.0,
    positive_iou: float = 0.35,
    negative_iou: float = 0.35,
    detector_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> FaceDetector:
    """RetinaNet for faces, on a ResNet with a feature pyramid, with a block in it if one is named.

    Three anchors at every position of every level, 1.3 times as high as wide, the smallest with a side of
    `anchor_scale` strides; focal loss and DIoU loss. An anchor is to find a face where their IoU is at least
    `positive_iou`, or the largest that any anchor has with it, and nothing where it is below `negative_iou`.
    Training images are taken as they are; others are resized to a shorter side of 1,100 unless the longer one
    would be above 1,650 then.
    `levels`: strides are 2^level; tiny faces need level 2. All else is as for `mask_rcnn`, `detector_options`
    are arguments of `torchvision.models.detection.RetinaNet`, and faces have the label 0.

    >>> model = face_detector("resnet18", block="poly_nl", levels=(2, 3, 4, 5))
    >>> model.backbone.body.layer3[1].polynl_before.channels
    256
    """
    check_options_have_block(block, options)
    further = _further(detector_options, FACE_ARGUMENTS, "face_detector")
    if not 0 <= negative_iou <= positive_iou <= 1:
        raise ValueError(
            f"negative_iou={negative_iou}, positive_iou={positive_iou}: expected numbers from 0 to 1, the "
            "first not above the second"
        )
    if trainable_stages is None and not (weights is backbone_weights is None):
        trainable_stages = 3
    backbone = resnet_fpn(
        arch,
        channels=fpn_channels,
        levels=levels,
        trainable_stages=trainable_stages,
        norm=norm,
        norm_eps=norm_eps,
        stride_in_1x1=stride_in_1x1,
        arch_options=arch_options,
    )
    if anchor_scale <= 0:
        raise ValueError(f"anchor_scale={anchor_scale}: expected a number above 0")
    sizes = tuple(tuple(anchor_scale * 2**level * scale for scale in FACE_SCALES) for level in levels)
    model = FaceDetector(
        backbone,
        num_classes=1,
        anchor_generator=ExactAnchors(sizes, ((FACE_RATIO,),) * len(sizes)),
        head=RetinaNetHead(fpn_channels, len(FACE_SCALES), 1),
        fg_iou_thresh=positive_iou,
        bg_iou_thresh=negative_iou,
        # Else the coarsest map would have another stride than in training.
        size_divisible=2 ** max(levels),
        _skip_resize=True,
        **{"min_size": 1100, "max_size": 1650, **further},
    )
    model.head.regression_head._loss_type = "diou"
    model = _completed(model, block, placement, options, norm)
    _load(model, weights, weights_without, backbone_weights)
    return model


class ExactAnchors(AnchorGenerator):  # type: ignore[misc]  # torchvision has no types
    """Anchors in float32 and of the sizes asked for; torchvision's have whole pixels, and the maps' dtype."""

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """Corners around the origin, of each ratio of height to width in each size."""
        sides = torch.as_tensor(scales, dtype=torch.float32, device=device)
        root = torch.as_tensor(aspect_ratios, dtype=torch.float32, device=device).sqrt()[:, None]
        width, height = (sides / root).flatten() / 2, (sides * root).flatten() / 2
        return torch.stack([-width, -height, width, height], 1)

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put them where the maps are."""
        self.cell_anchors = [cell.to(device) for cell in self.cell_anchors]  # type: ignore[has-type]


class FaceDetector(RetinaNet):  # type: ignore[misc]  # torchvision has no types
    """RetinaNet whose boxes are in float32, and whose anchors are matched a part at a time."""

    def compute_loss(
        self, targets: list[dict[str, Tensor]], head_outputs: dict[str, Tensor], anchors: list[Tensor]
    ) -> dict[str, Tensor]:
        """The focal loss and the loss of boxes."""
        thresholds = self.proposal_matcher.high_threshold, self.proposal_matcher.low_threshold
        with torch.autocast(anchors[0].device.type, enabled=False):
            owners = [
                matched(target["boxes"], places, positive=thresholds[0], negative=thresholds[1])
                for target, places in zip(targets, anchors, strict=True)
            ]
            heads = {name: value.float() for name, value in head_outputs.items()}
            return self.head.compute_loss(targets, heads, anchors, owners)

    def postprocess_detections(
        self,
        head_outputs: dict[str, list[Tensor]],
        anchors: list[list[Tensor]],
        image_shapes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """The boxes that are left of all anchors; 16 bits would move those of large images by pixels."""
        heads = {name: [value.float() for value in values] for name, values in head_outputs.items()}
        with torch.autocast(anchors[0][0].device.type, enabled=False):
            return super().postprocess_detections(heads, anchors, image_shapes)


def _further(options: Mapping[str, Any] | None, own: Mapping[str, str | None], of: str) -> Mapping[str, Any]:
    """The options of a detector, none of which we set ourselves."""
    options = {} if options is None else options
    for option in options:
        if option in own:
            instead = "leave it out" if own[option] is None else f"use {of}({own[option]}=...) instead"
            raise ValueError(f"detector_options: {of} sets {option} itself; {instead}")
    return options


def _completed(
    model: Model,
    block: str | Callable[..., nn.Module] | None,
    placement: str | Sequence[str],
    options: Mapping[str, Any],
    norm: Norm,
) -> Model:
    """The detector with the block in it, whose norms are synchronised with those of the ResNet."""
    if block is not None:
        # A list, as detectors take it, or the modules around the images would seem to get a map.
        insert_at(model, block, placement, body=BODY, example=([torch.zeros(3, 64, 64)],), **options)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if norm == "sync" else model


def _load(
    model: nn.Module,
    weights: str | os.PathLike[str] | None,
    without: Sequence[str],
    backbone_weights: str | os.PathLike[str] | None,
) -> None:
    """The weights of the ResNet, then those of the whole."""
    if backbone_weights is not None:
        body = model.get_submodule(BODY)
        try:
            load_weights(body, backbone_weights, without=("fc",))
        except ValueError as error:
            said = str(error).replace(type(body).__name__, "ResNet of the detector")
            raise ValueError(f"backbone_weights: {said}") from error
    if weights is not None:
        check_left_out(model, without)
        load_weights(model, weights, without)
