"""Torchvision's Faster R-CNN with a block in its ResNet; Mask R-CNN adds a head to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign

from polynl.config import Side, Width, configured
from polynl.models.pyramid import DetectorConfig

ASPECT_RATIOS = (0.5, 1.0, 2.0)


class FasterRCNNConfig(DetectorConfig):
    """The detector: proposals and a box head."""

    detector = FasterRCNN
    own = {  # noqa: RUF012
        "backbone": "arch",
        "num_classes": None,
        "rpn_anchor_generator": "anchor_sizes",
        "box_roi_pool": "roi_scale",
        "box_head": "box_width",
        "box_predictor": "box_width",
    }

    box_width: Width = 1024
    """Channels of the box head's two layers."""
    anchor_sizes: tuple[Annotated[float, Field(gt=0)], ...] = (32, 64, 128, 256, 512)
    """Sides of anchors in pixels of the resized image, one for each level of the pyramid."""
    roi_scale: Side = 224
    """Side of a box that is pooled from the map of stride 16; one twice as large, from the next."""

    def build(self, num_classes: int) -> FasterRCNN:
        """The detector; `num_classes` counts the background."""
        backbone = self.backbone()
        maps = [str(level) for level in range(len(backbone.fpn.inner_blocks))]
        sizes = self.anchor_sizes
        if len(sizes) != len(maps) + 1:
            raise ValueError(
                f"anchor_sizes={list(sizes)}: expected {len(maps) + 1} numbers, one for each level"
            )
        model = type(self).detector(
            backbone,
            rpn_anchor_generator=AnchorGenerator(
                tuple((size,) for size in sizes), (ASPECT_RATIOS,) * len(sizes)
            ),
            box_roi_pool=self.roi_pool(maps, 7),
            box_head=TwoMLPHead(self.fpn_channels * 7**2, self.box_width),
            box_predictor=FastRCNNPredictor(self.box_width, num_classes),
            **self.further_heads(maps, num_classes),
            min_size=self.min_size,
            max_size=self.max_size,
            **self.detector_options,
        )
        return self.complete(model)

    def roi_pool(self, maps: Sequence[str], side: int) -> MultiScaleRoIAlign:
        """Pools boxes to side × side, each from the map that fits its size."""
        return MultiScaleRoIAlign(maps, side, 2, canonical_scale=self.roi_scale)

    def further_heads(self, maps: Sequence[str], num_classes: int) -> dict[str, Any]:
        """Arguments of `detector` for heads besides that of boxes."""
        return {}


def faster_rcnn(arch: str = "resnet50", *, num_classes: int = 91, **keys: Any) -> FasterRCNN:
    """Faster R-CNN with a block in its ResNet; `keys` are those of `FasterRCNNConfig`.

    >>> model = faster_rcnn("resnet18", block="poly_nl", num_classes=3)
    >>> model.backbone.body.layer3[1].polynl_before.channels
    256
    """
    return configured(FasterRCNNConfig, arch=arch, **keys).build(num_classes)
