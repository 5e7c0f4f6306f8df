"""Scenes with an object for every item: what instance segmentation is tried out on."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from polynl.data.scenes import CATEGORIES, Scenes
from polynl.data.scenes_export import coco_content
from polynl.tasks.instance_segmentation.data import flipped


class SceneInstances(Dataset[tuple[Tensor, dict[str, Any]]]):
    """`count` scenes as `CocoImages` has them once `polynl data scenes` has written them to files.

    >>> scenes = SceneInstances(4, size=48, difficulty="easy", split="val", seed=0, training=True)
    >>> image, target = scenes[0]
    >>> tuple(image.shape), tuple(target["masks"].shape)
    ((3, 48, 48), (3, 48, 48))
    >>> [scenes.categories[number] for number in target["labels"].tolist()]
    ['ring', 'disc', 'cue']
    """

    def __init__(
        self,
        count: int,
        *,
        size: int,
        difficulty: str,
        split: str,
        seed: int,
        training: bool,
        flip: float = 0.5,
    ) -> None:
        self._scenes = Scenes(count, size=size, difficulty=difficulty, split=split, seed=seed)
        self._training, self._flip = training, v2.RandomHorizontalFlip(flip)
        self.categories: dict[int, str] = dict(enumerate(CATEGORIES, 1))

    @cached_property
    def ground_truth(self) -> dict[str, Any]:
        """What detections are compared with, in COCO's format."""
        scenes = self._scenes
        items = ((label, scenes.instances(number)) for number, label in enumerate(scenes.labels))
        return coco_content(items, size=scenes.size)

    @property
    def aspect_ratios(self) -> list[float]:
        """Width by height of every image."""
        return [1.0] * len(self)

    def __len__(self) -> int:
        return len(self._scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        number = range(len(self))[index]
        image, _ = self._scenes[number]
        target: dict[str, Any] = {"image_id": number}
        if not self._training:
            return image, target
        # None is without objects: the cue, at least, is large enough at any size.
        items = self._scenes.instances(number)
        objects = {"boxes": items.boxes, "labels": items.categories + 1, "masks": items.masks.byte()}
        return flipped(image, target | objects, self._flip)
