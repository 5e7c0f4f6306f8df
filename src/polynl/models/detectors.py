"""Detectors of torchvision with blocks in their ResNets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from polynl.models.placements import check_options_have_block, insert_at
from polynl.models.pyramids import BODY, Norm, resnet_fpn
from polynl.models.weights import load_weights

ASPECT_RATIOS = (0.5, 1.0, 2.0)
# What `mask_rcnn` sets itself, of MaskRCNN's arguments.
OWN_ARGUMENTS = {"backbone", "num_classes", "rpn_anchor_generator", "rpn_head", "kwargs"} | {
    f"{head}_{part}" for head in ("box", "mask") for part in ("roi_pool", "head", "predictor")
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
    `block` and its `options`: as for `polynl.insert`; a block is trained wherever it is.
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
    if trainable_stages is None and (weights is not None or backbone_weights is not None):
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
        **({} if detector_options is None else detector_options),
    )
    if block is not None:
        insert_at(model, block, placement, body=BODY, **options)
    if backbone_weights is not None:
        load_weights(model.get_submodule(BODY), backbone_weights, without=("fc",))
    if weights is not None:
        load_weights(model, weights, weights_without)
    return model
