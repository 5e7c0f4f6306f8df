"""Torchvision's Mask R-CNN with a block in its ResNet."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from polynl.config import Side, Width, configured
from polynl.models.pyramid import DetectorConfig

ASPECT_RATIOS = (0.5, 1.0, 2.0)


class MaskRCNNConfig(DetectorConfig):
    """The detector."""

    detector = MaskRCNN
    own = {  # noqa: RUF012
        "backbone": "arch",
        "num_classes": None,
        "rpn_anchor_generator": "anchor_sizes",
        "box_roi_pool": "roi_scale",
        "box_head": "box_width",
        "box_predictor": "box_width",
        "mask_roi_pool": "roi_scale",
        "mask_head": "mask_widths",
        "mask_predictor": "mask_widths",
    }

    box_width: Width = 1024
    """Channels of the box head's two layers."""
    mask_widths: Annotated[tuple[Width, ...], Field(min_length=1)] = (256, 256, 256, 256)
    """Channels of the mask head's convolutions."""
    anchor_sizes: tuple[Annotated[float, Field(gt=0)], ...] = (32, 64, 128, 256, 512)
    """Sides of anchors in pixels of the resized image, one for each level of the pyramid."""
    roi_scale: Side = 224
    """Side of a box that is pooled from the map of stride 16; one twice as large, from the next."""

    def build(self, num_classes: int) -> MaskRCNN:
        """The detector; `num_classes` counts the background."""
        backbone = self.backbone()
        maps = [str(level) for level in range(len(backbone.fpn.inner_blocks))]
        sizes = self.anchor_sizes
        if len(sizes) != len(maps) + 1:
            raise ValueError(
                f"anchor_sizes={list(sizes)}: expected {len(maps) + 1} numbers, one for each level"
            )
        last = self.mask_widths[-1]
        model = MaskRCNN(
            backbone,
            rpn_anchor_generator=AnchorGenerator(
                tuple((size,) for size in sizes), (ASPECT_RATIOS,) * len(sizes)
            ),
            box_roi_pool=MultiScaleRoIAlign(maps, 7, 2, canonical_scale=self.roi_scale),
            box_head=TwoMLPHead(self.fpn_channels * 7**2, self.box_width),
            box_predictor=FastRCNNPredictor(self.box_width, num_classes),
            mask_roi_pool=MultiScaleRoIAlign(maps, 14, 2, canonical_scale=self.roi_scale),
            mask_head=MaskRCNNHeads(self.fpn_channels, self.mask_widths, 1),
            mask_predictor=MaskRCNNPredictor(last, last, num_classes),
            min_size=self.min_size,
            max_size=self.max_size,
            **self.detector_options,
        )
        return self.complete(model)


def mask_rcnn(arch: str = "resnet50", *, num_classes: int = 91, **keys: Any) -> MaskRCNN:
    """Mask R-CNN with a block in its ResNet; `keys` are those of `MaskRCNNConfig`.

    >>> model = mask_rcnn("resnet18", block="poly_nl", placement="res345", num_classes=3)
    >>> model.backbone.body.layer2[1].polynl_before.channels
    128
    """
    return configured(MaskRCNNConfig, arch=arch, **keys).build(num_classes)
