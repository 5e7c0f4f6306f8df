"""Torchvision's Mask R-CNN with a block in its ResNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from polynl.config import Width, configured
from polynl.models.faster_rcnn import FasterRCNNConfig


class MaskRCNNConfig(FasterRCNNConfig):
    """The detector: proposals, a box head and a mask head."""

    detector = MaskRCNN
    own = {  # noqa: RUF012
        **FasterRCNNConfig.own,
        "mask_roi_pool": "roi_scale",
        "mask_head": "mask_widths",
        "mask_predictor": "mask_widths",
    }

    mask_widths: Annotated[tuple[Width, ...], Field(min_length=1)] = (256, 256, 256, 256)
    """Channels of the mask head's convolutions."""

    def further_heads(self, maps: Sequence[str], num_classes: int) -> dict[str, Any]:
        """The mask head."""
        last = self.mask_widths[-1]
        return {
            "mask_roi_pool": self.roi_pool(maps, 14),
            "mask_head": MaskRCNNHeads(self.fpn_channels, self.mask_widths, 1),
            "mask_predictor": MaskRCNNPredictor(last, last, num_classes),
        }


def mask_rcnn(arch: str = "resnet50", *, num_classes: int = 91, **keys: Any) -> MaskRCNN:
    """Mask R-CNN with a block in its ResNet; `keys` are those of `MaskRCNNConfig`.

    >>> model = mask_rcnn("resnet18", block="poly_nl", placement="res345", num_classes=3)
    >>> model.backbone.body.layer2[1].polynl_before.channels
    128
    """
    return configured(MaskRCNNConfig, arch=arch, **keys).build(num_classes)
