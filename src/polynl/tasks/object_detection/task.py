"""Object detection: Faster R-CNN's losses, COCO's AP of boxes."""

from __future__ import annotations

from polynl.tasks.coco.task import CocoDetection
from polynl.tasks.object_detection.config import ObjectDetectionConfig


class ObjectDetection(CocoDetection):
    """Scored by COCO's AP of boxes, in percent."""

    name = "object_detection"
    config = ObjectDetectionConfig
    scores = {"box_ap": "box AP", "box_ap50": "AP50", "box_ap75": "AP75"}  # noqa: RUF012
    best_by = "box_ap"
    headline = ("box_ap", "box_ap50")
    network = "Faster R-CNN, {arch},"
