"""The keys of object detection: COCO's files or scenes without masks, Faster R-CNN."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from polynl.models.faster_rcnn import FasterRCNNConfig
from polynl.tasks.coco.config import CocoConfig, SceneInstancesConfig
from polynl.tasks.config import TaskConfig


class CocoBoxesConfig(CocoConfig):
    """Images on disk with boxes in COCO's format; segmentations are ignored."""

    about: ClassVar[str] = (
        "Images with annotations in COCO's format. Every object is to be found, with its category and box."
    )
    masks: ClassVar[bool] = False


class SceneBoxesConfig(SceneInstancesConfig):
    """Scenes drawn from a seed: nothing to download."""

    about: ClassVar[str] = (
        "Drawn scenes with coloured figures and a coloured square, the cue. Each of them is to be found, "
        "with its shape and box."
    )
    masks: ClassVar[bool] = False


class ObjectDetectionConfig(TaskConfig):
    """Images with objects, each with a box."""

    model: FasterRCNNConfig = FasterRCNNConfig()
    data: Annotated[CocoBoxesConfig | SceneBoxesConfig, Field(discriminator="source")]
