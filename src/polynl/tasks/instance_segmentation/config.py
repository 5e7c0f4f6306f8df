"""The keys of instance segmentation: COCO's files or scenes, Mask R-CNN."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polynl.data.config import SceneOptions, Split
from polynl.errors import SettingsError
from polynl.tasks.config import AnnotatedConfig, FlipConfig, FromScenes, TaskConfig
from polynl.tasks.instance_segmentation.annotations import only, read_annotations
from polynl.tasks.instance_segmentation.data import (
    CocoImages,
    Loaded,
    SceneInstances,
    contiguous_labels,
    labels_by_id,
)
from polynl.tasks.instance_segmentation.model import MaskRCNNConfig


class CocoConfig(AnnotatedConfig):
    """Images on disk with annotations in COCO's format."""

    source: Literal["coco"]
    train: str = "train2017"
    val: str = "val2017"
    train_annotations: str = "annotations/instances_train2017.json"
    val_annotations: str = "annotations/instances_val2017.json"
    categories: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the categories to learn and score (default: all)."""
    category_ids: Literal["keep", "renumber"] = "keep"
    """keep: the file's ids are the model's labels, as in torchvision's COCO weights; renumber: from 1 on."""
    group_by_aspect: bool = True
    """Make training batches of images of similar aspect ratio, so that little is padded."""

    def load(self, split: Split) -> Loaded:
        """The images and checked annotations of a split."""
        file, folder = self.places(split)
        everything = read_annotations(file, folder)
        chosen = everything if self.categories is None else only(everything, self.categories)
        if split == "val" and all(entry["iscrowd"] for entry in chosen.content["annotations"]):
            raise SettingsError(f"{file} has no object to find, so there is nothing to score.")
        labels = (labels_by_id if self.category_ids == "keep" else contiguous_labels)(chosen.categories)
        images = CocoImages(
            chosen,
            folder,
            labels=labels,
            training=split == "train",
            flip=self.flip,
            on_bad_image=self.on_bad_image,
        )
        return Loaded(
            images,
            names={label: chosen.categories[category] for category, label in labels.items()},
            category_ids={label: category for category, label in labels.items()},
            left_out=frozenset(everything.categories.keys() - chosen.categories.keys()),
        )


class SceneInstancesConfig(FlipConfig, SceneOptions, FromScenes):
    """Scenes drawn from a seed: nothing to download."""

    group_by_aspect: bool = False
    """Has no effect: all scenes are square."""

    def load(self, split: Split) -> Loaded:
        """The scenes of a split."""
        images = SceneInstances(**self.drawn_from(split), training=split == "train", flip=self.flip)
        return Loaded(images, images.categories, {label: label for label in images.categories})


InstanceData = Annotated[CocoConfig | SceneInstancesConfig, Field(discriminator="source")]


class InstanceSegmentationConfig(TaskConfig):
    """Images with objects, each with a box and a mask."""

    model: MaskRCNNConfig = MaskRCNNConfig()
    data: InstanceData
