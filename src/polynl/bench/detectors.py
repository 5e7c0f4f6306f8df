"""Detectors for the benchmark: images in, one tensor out, and the same boxes whatever the block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polynl.models.faster_rcnn import faster_rcnn
from polynl.models.pyramid import BODY
from polynl.models.resnet import insert_at
from polynl.tasks.face_detection.model import face_detector
from polynl.tasks.instance_segmentation.model import mask_rcnn

# Pixels per position of the coarsest map of the pyramid.
COARSEST_STRIDE = 64
# About as many as an image of COCO has.
OBJECTS = 8
# Images are divided by it. The norms of an untrained detector are frozen and normalise nothing, so several
# blocks of third degree in a row would take its features out of float16's range.
IMAGE_STD = (100.0, 100.0, 100.0)


class Detector(nn.Module):
    """A detector with torchvision's interface, as a module from a batch of square images to one tensor.

    In eval mode it returns all detected boxes, post-processing included. In train mode it returns the sum of
    the losses on the targets of `objects`.
    """

    def __init__(self, model: nn.Module, label: int = 1) -> None:
        super().__init__()
        self.model, self._label = model, label

    def forward(self, images: Tensor) -> Tensor:
        """All boxes, or the sum of the losses."""
        # torchvision's box operators do not support bfloat16, nor always float16: autocast runs them in
        # float32 and leaves everything else in its dtype.
        low_precision = images.dtype != torch.float32
        with torch.autocast(images.device.type, dtype=images.dtype, enabled=low_precision):
            if self.training:
                wanted = objects(len(images), images.shape[-1], images.device, self._label)
                losses = self.model(list(images), wanted)
                return torch.stack(list(losses.values())).sum()
            return torch.cat([found["boxes"] for found in self.model(list(images))])

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the backbone only: what follows depends on the number of boxes and has no fixed shapes."""
        self.model.get_submodule("backbone").compile(*args, **options)


# Drawn once for all variants, and before the clock starts.
@functools.lru_cache(maxsize=1)
def objects(batch: int, side: int, device: torch.device, label: int = 1) -> list[dict[str, Tensor]]:
    """Targets for a batch of images: the same rectangles of one class in every run."""
    generator = torch.Generator().manual_seed(0)
    extents = side * (0.1 + 0.4 * torch.rand(batch, OBJECTS, 2, generator=generator))
    corners = (side - extents) * torch.rand(batch, OBJECTS, 2, generator=generator)
    return [
        {
            "boxes": boxes.to(device),
            "labels": torch.full((OBJECTS,), label, device=device),
            "masks": _filled(boxes, side).to(device),
        }
        for boxes in torch.cat([corners, corners + extents], dim=2)
    ]


def _filled(boxes: Tensor, side: int) -> Tensor:
    """A mask per box, 1 inside the box."""
    pixels = torch.arange(side) + 0.5
    left, top, right, bottom = boxes[..., None].unbind(1)
    columns, rows = (left < pixels) & (pixels < right), (top < pixels) & (pixels < bottom)
    return (rows[:, :, None] & columns[:, None, :]).to(torch.uint8)


def rcnn_detector(
    rcnn: Callable[..., nn.Module],
    arch: str,
    block: Callable[[int], nn.Module] | None,
    placement: str,
    side: int,
    **options: Any,
) -> Detector:
    """`mask_rcnn` or `faster_rcnn` for images of this side, without resizing, with boxes of fixed number.

    The number of boxes that an untrained detector finds depends on the scale of its features: a block that
    enlarges them leaves few of 1000 proposals, and next to no work for the heads. With zeros in the layers
    that score and move boxes, the proposals are anchors. Three classes score above the threshold: enough that
    suppression leaves the full number of detections, without the candidates of all 90 classes that a
    threshold of 0 would give.
    """
    further = {"image_std": IMAGE_STD}
    model: Any = rcnn(arch, min_size=side, max_size=side, detector_options=further, **options)
    proposals, predictor = model.rpn.head, model.roi_heads.box_predictor
    _prepare(model, block, placement, proposals.cls_logits, proposals.bbox_pred, predictor)
    nn.init.constant_(predictor.cls_score.bias[1:4], 10.0)
    return Detector(model)


mask_rcnn_detector = functools.partial(rcnn_detector, mask_rcnn)
faster_rcnn_detector = functools.partial(rcnn_detector, faster_rcnn)


def face_detector_of_side(
    arch: str, block: Callable[[int], nn.Module] | None, placement: str, side: int, **options: Any
) -> Detector:
    """`face_detector` for images of this side, with as many candidates as possible.

    All anchors score 0.5 and stay in place, so suppression processes 5,000 per level, more than for a trained
    detector.
    """
    candidates = {"score_thresh": 0.02, "nms_thresh": 0.4, "topk_candidates": 5000, "detections_per_img": 750}
    further = {"image_std": IMAGE_STD, **candidates}
    model = face_detector(arch, min_size=side, max_size=side, detector_options=further, **options)
    head = model.head
    _prepare(model, block, placement, head.classification_head.cls_logits, head.regression_head.bbox_reg)
    return Detector(model, label=0)


def _prepare(
    model: nn.Module, block: Callable[[int], nn.Module] | None, placement: str, *boxes: nn.Module
) -> None:
    """Insert the block, and set the layers that score and move boxes to zero."""
    if block is not None:
        insert_at(model, block, placement, body=BODY)
    for layer in boxes:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)


class NetworkAlone(nn.Module):
    """A one-stage detector up to its head: it neither decodes nor suppresses boxes."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.model: Any = detector.model

    def forward(self, images: Tensor) -> Tensor:
        """Scores and box regressions of all anchors."""
        batch, _ = self.model.transform(list(images))
        maps = list(self.model.backbone(batch.tensors).values())
        heads = self.model.head(maps)
        return torch.cat([heads["cls_logits"], heads["bbox_regression"]], 2)
