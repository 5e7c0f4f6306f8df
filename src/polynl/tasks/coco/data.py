"""Images with object instances: in COCO's format, or scenes."""

from __future__ import annotations

import os
from abc import abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch
from pycocotools import mask as coco_mask
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import box_convert, clip_boxes_to_image
from torchvision.transforms import v2

from polynl.data.config import Split
from polynl.data.images import Unreadable, UnreadableImageError, read_for_detector, read_or_stand_in
from polynl.data.scenes import CATEGORIES, Scenes
from polynl.data.scenes_export import coco_content
from polynl.errors import SettingsError
from polynl.tasks.coco.annotations import Annotations, Entry, encoded

_LARGEST_LABEL = 1000
# In pixels: a thinner box may have no extent once it is flipped or resized, in float32.
_LEAST_EXTENT = 0.01
_ASPECT_BINS = [2.0 ** (-1 + place / 3) for place in range(7)]


class InstanceSamples(Dataset[Any]):
    """Images and their objects: (image as uint8, target), as in torchvision's reference.

    A target has the `image_id`; in training also `boxes` (k, 4) as left, top, right and bottom edge, `labels`
    (k,) and, unless only boxes are learned, `masks` (k, h, w).
    """

    categories: dict[int, str]
    """Names by label."""
    category_ids: dict[int, int]
    """COCO's ids by label."""
    left_out: frozenset[int] = frozenset()
    """Ids of categories that are neither learned nor scored."""
    image_ids: Sequence[int]

    def __init__(self, *, training: bool, flip: float = 0.5, masks: bool = True) -> None:
        self._training, self._flip, self._masks = training, v2.RandomHorizontalFlip(flip), masks

    @abstractmethod
    def image(self, number: int) -> Tensor | Unreadable:
        """An image as uint8, (3, h, w)."""

    @abstractmethod
    def objects(self, number: int) -> dict[str, Tensor]:
        """The boxes, labels and, unless only boxes are learned, masks to learn from."""

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]] | Unreadable:
        number = range(len(self))[index]
        image = self.image(number)
        if isinstance(image, Unreadable):
            return image
        target = {"image_id": self.image_ids[number]}
        if not self._training:
            return image, target
        parts: dict[str, Any] = self.objects(number)
        parts["image"] = tv_tensors.Image(image)
        size = tuple(image.shape[1:])
        parts["boxes"] = tv_tensors.BoundingBoxes(parts["boxes"], format="XYXY", canvas_size=size)
        if "masks" in parts:
            parts["masks"] = tv_tensors.Mask(parts["masks"])
        flipped = {name: part.as_subclass(Tensor) for name, part in self._flip(parts).items()}
        return flipped.pop("image"), target | flipped


class CocoImages(InstanceSamples):
    """Images in files, in order of ids; `labels` are by category.

    Objects to learn from are not crowds, and their box has some extent in the image. Training leaves out
    images without annotations, or whose boxes all have a side of at most 1; one that has only crowds stays,
    with k = 0. Scoring uses all images.

    `on_bad_image` "stop": an image that cannot be decoded, or whose size the annotations contradict, raises;
    "skip": it becomes an `Unreadable`.
    """

    def __init__(
        self,
        annotations: Annotations,
        folder: str | os.PathLike[str],
        *,
        labels: Mapping[int, int],
        on_bad_image: Literal["stop", "skip"],
        training: bool,
        flip: float = 0.5,
        masks: bool = True,
    ) -> None:
        super().__init__(training=training, flip=flip, masks=masks)
        missing = sorted(annotations.categories.keys() - labels.keys())
        if training and missing:
            raise ValueError(f"labels {dict(labels)}: expected one for each category, also for {missing}.")
        self._path, self._folder, self._labels = annotations.path, os.fspath(folder), labels
        self._stops = on_bad_image == "stop"
        self.ground_truth, self.left_out = annotations.content, annotations.left_out
        self.category_ids = {label: category for category, label in labels.items()}
        self.categories = {label: annotations.categories[one] for label, one in self.category_ids.items()}
        self._objects: dict[int, list[Entry]] = defaultdict(list)
        for entry in self.ground_truth["annotations"]:
            self._objects[entry["image_id"]].append(entry)
        images = sorted(self.ground_truth["images"], key=lambda image: image["id"])
        if training:
            entries = self.ground_truth["annotations"]
            large = {entry["image_id"] for entry in entries if min(entry["bbox"][2:]) > 1}
            images = [image for image in images if image["id"] in large]
        if not images:
            wanted = "image with an object to train on" if training else "image"
            raise SettingsError(f"{annotations.path} has no {wanted}.")
        self._images: list[Entry] = images
        self.image_ids = [image["id"] for image in images]

    @property
    def aspect_ratios(self) -> list[float]:
        """Width ÷ height of every image, from the annotations."""
        return [image["width"] / image["height"] for image in self._images]

    def image(self, number: int) -> Tensor | Unreadable:
        """An image, or what is wrong with its file."""
        entry = self._images[number]
        path = os.path.join(self._folder, entry["file_name"])
        remedy = "Fix it, or remove it from the annotations"
        return read_or_stand_in(path, stops=self._stops, remedy=remedy, read=partial(self._read, entry))

    def _read(self, entry: Entry, path: str) -> Tensor:
        image = read_for_detector(path)
        (height, width), said = image.shape[1:], (entry["width"], entry["height"])
        if (width, height) != said:
            raise UnreadableImageError(
                f"{path} is {width} wide and {height} high, and {self._path} says {said[0]} wide "
                f"and {said[1]} high (image id {entry['id']})"
            )
        return image

    def objects(self, number: int) -> dict[str, Tensor]:
        """The boxes, labels and masks of all but crowds and boxes without extent."""
        image = self._images[number]
        entries = [entry for entry in self._objects.get(image["id"], []) if not entry["iscrowd"]]
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        boxes = clip_boxes_to_image(box_convert(boxes, "xywh", "xyxy"), (image["height"], image["width"]))
        (kept,) = torch.where((boxes[:, 2:] - boxes[:, :2] > _LEAST_EXTENT).all(1))
        entries = [entries[place] for place in kept.tolist()]
        labels = torch.tensor([self._labels[entry["category_id"]] for entry in entries], dtype=torch.int64)
        found = {"boxes": boxes[kept], "labels": labels}
        return found | {"masks": _decoded(entries, image)} if self._masks else found


def _decoded(entries: Sequence[Entry], image: Entry) -> Tensor:
    """The masks of some objects of an image, (k, h, w)."""
    if not entries:
        return torch.zeros(0, image["height"], image["width"], dtype=torch.uint8)
    columns = coco_mask.decode([encoded(entry["segmentation"], image) for entry in entries])
    return torch.from_numpy(columns).permute(2, 0, 1).contiguous()


class SceneInstances(InstanceSamples):
    """`count` scenes, with samples as `CocoImages` has them for the files of `polynl data scenes`.

    >>> scenes = SceneInstances(4, size=48, difficulty="easy", split="val", seed=0, training=True)
    >>> image, target = scenes[0]
    >>> tuple(image.shape), tuple(target["masks"].shape)
    ((3, 48, 48), (3, 48, 48))
    >>> [scenes.categories[number] for number in target["labels"].tolist()]
    ['ring', 'disc', 'cue']
    """

    def __init__(
        self, count: int, *, size: int, difficulty: str, split: Split, seed: int, **options: Any
    ) -> None:
        super().__init__(**options)
        self._scenes = Scenes(count, size=size, difficulty=difficulty, split=split, seed=seed)
        self.image_ids = range(count)
        self.categories = dict(enumerate(CATEGORIES, 1))
        self.category_ids = {label: label for label in self.categories}

    @cached_property
    def ground_truth(self) -> dict[str, Any]:
        """The ground truth in COCO's format."""
        scenes = self._scenes
        items = ((label, scenes.instances(number)) for number, label in enumerate(scenes.labels))
        content = coco_content(items, size=scenes.size)
        if not self._masks:
            for entry in content["annotations"]:
                del entry["segmentation"]
        return content

    @property
    def aspect_ratios(self) -> list[float]:
        """Width ÷ height of every image."""
        return [1.0] * len(self)

    def image(self, number: int) -> Tensor:
        """A scene."""
        return self._scenes.images[number]

    def objects(self, number: int) -> dict[str, Tensor]:
        """All items; no scene is without any: at any size the cue, at least, is large enough."""
        items = self._scenes.instances(number)
        found = {"boxes": items.boxes, "labels": items.categories + 1}
        return found | {"masks": items.masks.byte()} if self._masks else found


def aspect_groups(ratios: Sequence[float]) -> list[int]:
    """Which images may share a batch: 8 groups of similar aspect ratio, as in torchvision's reference.

    >>> aspect_groups([0.4, 0.5, 0.99, 1.0, 1.5, 2.0])
    [0, 1, 3, 4, 5, 7]
    """
    return [bisect_right(_ASPECT_BINS, ratio) for ratio in ratios]


def contiguous_labels(categories: Iterable[int]) -> dict[int, int]:
    """Labels from 1 on, in order of ids.

    >>> contiguous_labels({90: "toothbrush", 1: "person"})
    {1: 1, 90: 2}
    """
    return {number: label for label, number in enumerate(sorted(categories), 1)}


def labels_by_id(categories: Mapping[int, str]) -> dict[int, int]:
    """Every category's id is its label, as in weights trained on COCO: 80 labels, up to 90."""
    for number, name in sorted(categories.items()):
        if not 1 <= number <= _LARGEST_LABEL:
            raise SettingsError(
                f"category {name!r} has the id {number}: a label is a number from 1 to {_LARGEST_LABEL}; "
                "--data.category-ids renumber numbers the categories from 1."
            )
    return {number: number for number in sorted(categories)}
