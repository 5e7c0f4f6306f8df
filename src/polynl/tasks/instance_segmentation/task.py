"""Instance segmentation: Mask R-CNN, COCO's AP of boxes and masks."""

from __future__ import annotations

from polynl.tasks.base import PaperTable
from polynl.tasks.coco.task import CocoDetection
from polynl.tasks.instance_segmentation.config import InstanceSegmentationConfig


class InstanceSegmentation(CocoDetection):
    """Scored by COCO's AP of boxes and of masks, in percent."""

    name = "instance_segmentation"
    config = InstanceSegmentationConfig
    scores = {  # noqa: RUF012
        "box_ap": "box AP",
        "box_ap50": "AP50",
        "box_ap75": "AP75",
        "mask_ap": "mask AP",
        "mask_ap50": "AP50",
        "mask_ap75": "AP75",
    }
    best_by = "mask_ap"
    headline = ("box_ap", "mask_ap")
    network = "Mask R-CNN, {arch},"
    hub_task = "image-segmentation"
    paper = PaperTable(
        "Mask R-CNN, ResNet-50, on COCO",
        tuple(scores),
        source="coco",
        images=5_000,
        rows={
            "none": (37.9, 59.2, 41.0, 34.6, 56.0, 36.9),
            "non_local": (38.8, 60.6, 42.0, 35.4, 57.3, 37.7),
            "tesa": (39.5, 60.9, 43.1, 35.4, 57.2, 37.5),
            "latent_gnn": (38.9, 60.4, 42.4, 35.3, 57.3, 37.4),
            "efficient_nl": (38.9, 60.3, 42.2, 35.4, 57.2, 37.7),
            "poly_nl": (39.2, 60.8, 42.2, 35.4, 57.4, 37.6),
            "poly_nl@res3": (38.6, 60.1, 41.5, 35.2, 56.9, 37.4),
            "poly_nl@res5": (38.7, 60.6, 41.9, 35.2, 57.2, 37.3),
            "poly_nl@res345": (39.8, 61.7, 43.2, 36.0, 58.4, 38.3),
        },
        digits=1,
    )
