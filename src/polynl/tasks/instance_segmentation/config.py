"""The keys of instance segmentation: COCO's files or scenes, Mask R-CNN."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polynl.tasks.coco.config import CocoConfig, SceneInstancesConfig
from polynl.tasks.config import TaskConfig
from polynl.tasks.instance_segmentation.model import MaskRCNNConfig


class InstanceSegmentationConfig(TaskConfig):
    """Images with objects, each with a box and a mask."""

    model: MaskRCNNConfig = MaskRCNNConfig()
    data: Annotated[CocoConfig | SceneInstancesConfig, Field(discriminator="source")]
