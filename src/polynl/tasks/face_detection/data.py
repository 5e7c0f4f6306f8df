"""Images with faces: WIDER FACE, with a text file and a folder for every event, or files in COCO's format."""

from __future__ import annotations

import os
import posixpath
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.ops import box_convert, clip_boxes_to_image

from polynl.data.annotation_files import (
    FURTHEST,
    are_coordinates,
    check_there,
    is_count,
    leaves,
    read_lines,
)
from polynl.data.images import Unreadable, read_for_detector, read_or_stand_in
from polynl.errors import SettingsError, shown
from polynl.tasks.coco.annotations import Annotations, Entry

FaceTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Transforms an image and the boxes (k, 4) of its faces, xyxy; it may leave faces out."""
# Its place in x y w h blur expression illumination invalid occlusion pose.
_INVALID = 7
_FACE = f"x y w h and up to six attributes, finite numbers below {FURTHEST:,.0f}"


@dataclass(frozen=True, eq=False)
class FaceImage:
    """The faces of one image, in the file's order, which the official subsets refer to."""

    name: str
    """The event's folder and the file, such as "0--Parade/0_Parade_marchingband_1_849.jpg".

    In COCO's format, any path below the folder of images.
    """
    boxes: Tensor
    """(n, 4): left and top edge, width, height."""
    invalid: Tensor
    """(n,), true for a face that the file flags as invalid."""

    @property
    def empty(self) -> Tensor:
        """(n,), true for a box without width or height."""
        return (self.boxes[:, 2:] <= 0).any(1)

    @property
    def usable(self) -> Tensor:
        """(n,), true for a face to train on: neither invalid nor empty."""
        return ~(self.invalid | self.empty)


def counts(faces: Sequence[FaceImage]) -> str:
    """The numbers of images and faces, and of the faces that training leaves out, in words."""
    invalid = sum(int(image.invalid.sum()) for image in faces)
    empty = sum(int((image.empty & ~image.invalid).sum()) for image in faces)
    return (
        f"{len(faces):,} images with {sum(len(image.boxes) for image in faces):,} faces, of which "
        f"{invalid:,} are flagged invalid and {empty:,} have no width or height"
    )


def event_and_name(name: str) -> tuple[str, str]:
    """The event and name of an image, as in the official evaluation.

    >>> event_and_name("0--Parade/0_Parade_marchingband_1_849.jpg"), event_and_name("me.jpg")
    (('0--Parade', '0_Parade_marchingband_1_849'), ('.', 'me'))
    """
    event, file = posixpath.split(name)
    return event or ".", posixpath.splitext(file)[0]


def read_faces(path: Path, folder: Path) -> list[FaceImage]:
    """The faces that `path` lists for the images in `folder`; a SettingsError names the first wrong line."""
    entries = dict(_entries(path))
    if not entries:
        raise SettingsError(f"{path} has no image.")
    check_there(entries, folder, annotations=path)
    return [
        FaceImage(
            name,
            boxes=torch.tensor([face[:4] for face in faces], dtype=torch.float32).reshape(-1, 4),
            invalid=torch.tensor([any(face[_INVALID : _INVALID + 1]) for face in faces], dtype=torch.bool),
        )
        for name, faces in entries.items()
    ]


def faces_of(annotations: Annotations) -> list[FaceImage]:
    """All boxes of COCO annotations; crowds are invalid."""
    faces: dict[int, list[Entry]] = {image["id"]: [] for image in annotations.content["images"]}
    for entry in annotations.content["annotations"]:
        faces[entry["image_id"]].append(entry)
    known: dict[tuple[str, str], str] = {}
    for name in (image["file_name"] for image in annotations.content["images"]):
        if other := known.get(event_and_name(name)):
            raise SettingsError(
                f"{annotations.path}: the images {shown(other)} and {shown(name)} have the same name up to "
                "their suffixes, by which faces are scored: rename or remove one of the two."
            )
        known[event_and_name(name)] = name
    return [
        FaceImage(
            image["file_name"],
            boxes=torch.tensor([entry["bbox"] for entry in faces[image["id"]]]).float().reshape(-1, 4),
            invalid=torch.tensor([entry["iscrowd"] for entry in faces[image["id"]]], dtype=torch.bool),
        )
        for image in annotations.content["images"]
    ]


class FaceSamples(Dataset[Any]):
    """Images and their faces: (image as uint8, target).

    A target has the `image_id`, which is the place in this data set, and the `name`. In training it also has
    `boxes` (k, 4), xyxy, and `labels` (k,), all 1, of the faces that the transform keeps, clipped to the
    image; an image without faces stays, with k = 0.
    """

    def __init__(
        self,
        names: Sequence[str],
        boxes: Sequence[Tensor],
        *,
        training: bool,
        transform: FaceTransform | None = None,
    ) -> None:
        self.names = list(names)
        # One tensor: processes share a tensor as an open file, and cannot open one for every image.
        self._all_boxes = torch.cat([torch.empty(0, 4), *boxes])
        self._starts = [0, *accumulate(map(len, boxes))]
        self._training, self._transform = training, transform

    def __len__(self) -> int:
        return len(self.names)

    def boxes(self, number: int) -> Tensor:
        """The faces of an image, (k, 4): left and top edge, width, height."""
        return self._all_boxes[self._starts[number] : self._starts[number + 1]]

    @abstractmethod
    def image(self, number: int) -> Tensor | Unreadable:
        """An image as uint8, (3, h, w)."""

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]] | Unreadable:
        number = range(len(self))[index]
        image = self.image(number)
        if isinstance(image, Unreadable):
            return image
        boxes = clip_boxes_to_image(box_convert(self.boxes(number), "xywh", "xyxy"), image.shape[1:])
        boxes = boxes[(boxes[:, 2:] > boxes[:, :2]).all(1)]
        if self._transform is not None:
            image, boxes = self._transform(image, boxes)
        target = {"image_id": number, "name": self.names[number]}
        if not self._training:
            return image, target
        return image, target | {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}


class FaceImages(FaceSamples):
    """Images in files, with their usable faces, in the order of the annotations.

    `on_bad_image` "stop": an image that cannot be decoded raises; "skip": it becomes an `Unreadable`.
    """

    def __init__(
        self,
        faces: Sequence[FaceImage],
        folder: str | os.PathLike[str],
        *,
        on_bad_image: Literal["stop", "skip"],
        **options: Any,
    ) -> None:
        names = [image.name for image in faces]
        super().__init__(names, [image.boxes[image.usable] for image in faces], **options)
        self._folder, self._stops = os.fspath(folder), on_bad_image == "stop"

    def image(self, number: int) -> Tensor | Unreadable:
        """An image, or what is wrong with its file."""
        path = os.path.join(self._folder, self.names[number])
        remedy = "Fix it, or remove it from the annotations"
        return read_or_stand_in(path, stops=self._stops, remedy=remedy, read=read_for_detector)


# What can be wrong with a file


def _entries(path: Path) -> Iterator[tuple[str, list[list[float]]]]:
    """The images of a file and the numbers of their faces, all of them checked."""
    lines = read_lines(path, remedy=" WIDER FACE has it in wider_face_split.zip.")
    # Blank lines do not count, except in the numbers of the others.
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    texts = [lines[number - 1].strip() for number in numbers]
    known: dict[str, int] = {}
    place = 0
    while place < len(texts):
        name = texts[place]
        if wrong := _wrong_name(name, known):
            if known and _is_face(_numbers(name)):
                last, at = list(known.items())[-1]
                wrong += f"; or {shown(last)} on line {at} has more faces than its count says"
            raise SettingsError(f"{path}, line {numbers[place]}: {wrong}.")
        known[name] = numbers[place]
        place += 2
        count = texts[place - 1] if place <= len(texts) else ""
        if not is_count(count):
            raise SettingsError(
                f"{path}, line {numbers[place - 2 + bool(count)]}: {shown(count)} is not a number of faces, "
                f"for {shown(name)}: expected a whole number."
            )
        faces = [_numbers(text) for text in texts[place : place + int(count)]]
        for at, face in enumerate(faces):
            if not _is_face(face):
                raise SettingsError(
                    f"{path}, line {numbers[place + at]}: {shown(texts[place + at])} is not a face, "
                    f"{at + 1:,} of {int(count):,} for {shown(name)}: expected {_FACE}."
                )
        if len(faces) < int(count):
            raise SettingsError(
                f"{path}, line {numbers[place - 1]}: {shown(name)} has {int(count):,} faces, but only "
                f"{len(faces):,} lines follow. Is the file truncated?"
            )
        yield name, faces
        place += len(faces)
        # In the official files, an image without faces has a line of zeros.
        if not faces and place < len(texts) and set(_numbers(texts[place])) == {0.0}:
            place += 1


def _wrong_name(name: str, known: Mapping[str, int]) -> str | None:
    if not name.lower().endswith(IMG_EXTENSIONS):
        return f"{shown(name)} is not the name of an image: expected a path such as 0--Parade/0_Parade_1.jpg"
    if leaves(name):
        return f"{shown(name)}: expected a path that is relative to the folder and stays in it"
    if name in known:
        return f"{shown(name)} is already on line {known[name]}: remove one of the two"
    return None


def _numbers(line: str) -> list[float]:
    """The numbers on a line, or none where it has anything else."""
    try:
        return [float(word) for word in line.split()]
    except ValueError:
        return []


def _is_face(values: list[float]) -> bool:
    return 4 <= len(values) <= 10 and are_coordinates(values)
