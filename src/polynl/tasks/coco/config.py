"""Keys of data in COCO's format, and of scenes with boxes and masks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polynl.data.config import SceneOptions, Split
from polynl.errors import SettingsError
from polynl.tasks.coco.annotations import only, read_annotations
from polynl.tasks.coco.data import (
    CocoImages,
    SceneInstances,
    contiguous_labels,
    labels_by_id,
)
from polynl.tasks.config import AnnotatedConfig, FlipConfig, FromScenes


class CocoConfig(AnnotatedConfig):
    """Images on disk with annotations in COCO's format."""

    about: ClassVar[str] = (
        "Images with annotations in COCO's format. Every object is to be found, with its category, box and "
        "mask."
    )
    masks: ClassVar[bool] = True
    """Whether objects have masks; else segmentations are neither needed nor read."""

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

    def load(self, split: Split) -> CocoImages:
        """The images and checked annotations of a split."""
        file, folder = self.places(split)
        annotations = read_annotations(file, folder, masks=self.masks)
        if self.categories is not None:
            annotations = only(annotations, self.categories)
        if split == "val" and all(entry["iscrowd"] for entry in annotations.content["annotations"]):
            raise SettingsError(f"{file} has no object to find, so there is nothing to score.")
        numbered = labels_by_id if self.category_ids == "keep" else contiguous_labels
        return CocoImages(
            annotations,
            folder,
            labels=numbered(annotations.categories),
            training=split == "train",
            flip=self.flip,
            masks=self.masks,
            on_bad_image=self.on_bad_image,
        )


class SceneInstancesConfig(FlipConfig, SceneOptions, FromScenes):
    """Scenes drawn from a seed: nothing to download."""

    about: ClassVar[str] = (
        "Drawn scenes with coloured figures and a coloured square, the cue. Each of them is to be found, "
        "with its shape, box and mask."
    )
    masks: ClassVar[bool] = True

    group_by_aspect: bool = False
    """Has no effect: all scenes are square."""

    def load(self, split: Split) -> SceneInstances:
        """The scenes of a split."""
        return SceneInstances(
            **self.drawn_from(split), training=split == "train", flip=self.flip, masks=self.masks
        )
