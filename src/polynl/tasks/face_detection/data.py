"""WIDER FACE, in its official layout: a text file of faces, and a folder of images for every event."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.ops import box_convert

from polynl.data.annotation_files import FURTHEST, are_coordinates, check_there, leaves, shown
from polynl.data.images import Unreadable, read_for_detector, read_or_stand_in
from polynl.errors import SettingsError

FaceTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Transforms an image and the boxes (k, 4) of its faces, xyxy; it may leave faces out."""
# Its place in x y w h blur expression illumination invalid occlusion pose.
_INVALID = 7
_FACE = f"x y w h and up to six attributes, finite numbers below {FURTHEST:,.0f}"


@dataclass(frozen=True, eq=False)
class FaceImage:
    """The faces of one image, in the file's order, which the official subsets refer to."""

    name: str
    """The event's folder and the file, such as "0--Parade/0_Parade_marchingband_1_849.jpg"."""
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


@dataclass(frozen=True)
class FaceCounts:
    """The numbers of all faces and of those that training leaves out."""

    images: int
    faces: int
    invalid: int
    """Faces that the file flags."""
    empty: int
    """Faces without width or height that are not flagged."""

    @property
    def usable(self) -> int:
        """Faces to train on."""
        return self.faces - self.invalid - self.empty

    def __str__(self) -> str:
        left_out = f"{self.invalid:,} are flagged invalid and {self.empty:,} have no width or height"
        return f"{self.images:,} images with {self.faces:,} faces, of which {left_out}"


def count_faces(faces: Sequence[FaceImage]) -> FaceCounts:
    """Count all faces, also those that training leaves out."""
    return FaceCounts(
        images=len(faces),
        faces=sum(len(image.boxes) for image in faces),
        invalid=sum(int(image.invalid.sum()) for image in faces),
        empty=sum(int((image.empty & ~image.invalid).sum()) for image in faces),
    )


def event_and_name(name: str) -> tuple[str, str]:
    """The event and name of an image, as in the official evaluation.

    >>> event_and_name("0--Parade/0_Parade_marchingband_1_849.jpg")
    ('0--Parade', '0_Parade_marchingband_1_849')
    """
    event, file = posixpath.split(name)
    return event, posixpath.splitext(file)[0]


def read_faces(path: Path, folder: Path) -> list[FaceImage]:
    """The faces that `path` lists for the images in `folder`; a SettingsError names the first wrong line."""
    names: list[str] = []
    counts: list[int] = []
    values: list[list[float]] = []
    for name, faces in _entries(path):
        names.append(name)
        counts.append(len(faces))
        values += faces
    if not names:
        raise SettingsError(f"{path} has no image.")
    check_there(names, folder, annotations=path)
    boxes = torch.tensor([face[:4] for face in values], dtype=torch.float32).reshape(-1, 4)
    invalid = torch.tensor([face[_INVALID : _INVALID + 1] not in ([], [0.0]) for face in values])
    parts = zip(names, boxes.split(counts), invalid.bool().split(counts), strict=True)
    return [FaceImage(*part) for part in parts]


class FaceImages(Dataset[Any]):
    """Images and their faces, in the file's order: (image as uint8, target).

    A target has the `image_id`, which is the place in that order, and the `name`. In training it also has
    `boxes` (k, 4), xyxy, and `labels` (k,), all 1, of the usable faces that the transform keeps, clipped to
    the image; an image without faces stays, with k = 0.

    `on_bad_image` "stop": an image that cannot be decoded raises; "skip": it becomes an `Unreadable`.
    """

    def __init__(
        self,
        faces: Sequence[FaceImage],
        folder: str | os.PathLike[str],
        *,
        training: bool,
        transform: FaceTransform | None = None,
        on_bad_image: Literal["stop", "skip"],
    ) -> None:
        self.names = [image.name for image in faces]
        self._boxes = BoxesOfImages([image.boxes[image.usable] for image in faces])
        self._folder, self._training, self._transform = os.fspath(folder), training, transform
        self._stops = on_bad_image == "stop"

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]] | Unreadable:
        number = range(len(self))[index]
        path = os.path.join(self._folder, self.names[number])
        remedy = "Fix it, or remove it from the annotations"
        image = read_or_stand_in(path, stops=self._stops, remedy=remedy, read=read_for_detector)
        if isinstance(image, Unreadable):
            return image
        boxes = box_convert(self._boxes[number], "xywh", "xyxy")
        target = {"image_id": number, "name": self.names[number]}
        return face_sample(image, boxes, target, training=self._training, transform=self._transform)


class BoxesOfImages:
    """The boxes (k, 4) of every image, in one tensor.

    Processes share a tensor as an open file, and a process cannot open one for every image.
    """

    def __init__(self, boxes: Sequence[Tensor]) -> None:
        self._all = torch.cat([torch.empty(0, 4), *boxes])
        self._starts = [0, *accumulate(map(len, boxes))]

    def __getitem__(self, index: int) -> Tensor:
        return self._all[self._starts[index] : self._starts[index + 1]]


def face_sample(
    image: Tensor,
    boxes: Tensor,
    target: dict[str, Any],
    *,
    training: bool,
    transform: FaceTransform | None,
) -> tuple[Tensor, dict[str, Any]]:
    """A sample of `FaceImages`, from boxes as xyxy."""
    height, width = image.shape[1:]
    edges = torch.tensor([width, height, width, height])
    boxes = boxes.clamp(min=0).minimum(edges)
    boxes = boxes[(boxes[:, 2:] > boxes[:, :2]).all(1)]
    if transform is not None:
        image, boxes = transform(image, boxes)
    if not training:
        return image, target
    return image, target | {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}


# What can be wrong with a file


class _Line(NamedTuple):
    number: int
    text: str


def _entries(path: Path) -> Iterator[tuple[str, list[list[float]]]]:
    """The images of a file and the numbers of their faces, all of them checked."""
    lines = _lines(path)
    known: dict[str, int] = {}
    place = 0
    while place < len(lines):
        name = lines[place]
        if mistake := _wrong_name(name.text, lines, known):
            hint = _too_small(lines, place, known)
            raise SettingsError(f"{path}, line {name.number}: {mistake}{hint}.")
        known[name.text] = place
        count = _count(path, lines, place)
        faces = [_numbers(line.text) for line in lines[place + 2 : place + 2 + count]]
        if wrong := [at for at, face in enumerate(faces) if not _is_face(face)]:
            raise SettingsError(f"{path}, line {_wrong_face(lines, place, wrong[0])}.")
        yield name.text, faces
        place += 2 + count
        # In the official files, an image without faces has a line of zeros.
        if not count and place < len(lines) and set(_numbers(lines[place].text)) == {0.0}:
            place += 1


def _lines(path: Path) -> list[_Line]:
    """Lines that are not blank."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror or error}. WIDER FACE has it in wider_face_split.zip."
        ) from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}, line {number}: it is not UTF-8 text.") from None
    lines = enumerate(map(str.strip, text.split("\n")), 1)
    return [_Line(number, line) for number, line in lines if line]


def _is_name(text: str) -> bool:
    return text.lower().endswith(IMG_EXTENSIONS)


def _wrong_name(name: str, lines: list[_Line], known: dict[str, int]) -> str | None:
    if not _is_name(name):
        return f"{shown(name)} is not the name of an image: expected a path such as 0--Parade/0_Parade_1.jpg"
    if leaves(name):
        return f"{shown(name)}: expected a path that is relative to the folder and stays in it"
    if name in known:
        return f"{shown(name)} is already on line {lines[known[name]].number}: remove one of the two"
    return None


def _too_small(lines: list[_Line], place: int, known: dict[str, int]) -> str:
    """A further hint if there is a face where a name is expected."""
    if not known or not _is_face(_numbers(lines[place].text)):
        return ""
    name, at = list(known.items())[-1]
    count = lines[at + 1]
    return f"; or {shown(name)} has more faces than line {count.number} says, {count.text}"


def _count(path: Path, lines: list[_Line], place: int) -> int:
    """The number of faces of the image whose name is at `place`."""
    name, left = lines[place], len(lines) - place - 2
    if left < 0:
        raise SettingsError(
            f"{path}, line {name.number}: the file ends after {shown(name.text)}: expected the number "
            "of its faces. Is the file truncated?"
        )
    number, text = lines[place + 1]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise SettingsError(
            f"{path}, line {number}: {shown(text)} is not a number of faces, for {shown(name.text)}: "
            "expected a whole number."
        )
    if int(text) > left:
        raise SettingsError(
            f"{path}, line {number}: {shown(name.text)} has {int(text):,} faces, but only {left:,} lines "
            "follow. Is the file truncated?"
        )
    return int(text)


def _numbers(line: str) -> list[float]:
    """The numbers on a line, or none where it has anything else."""
    try:
        return [float(word) for word in line.split()]
    except ValueError:
        return []


def _is_face(values: list[float]) -> bool:
    return 4 <= len(values) <= 10 and are_coordinates(values)


def _wrong_face(lines: list[_Line], place: int, at: int) -> str:
    """What is wrong with a face of the image whose name is at `place`."""
    name, count, face = lines[place], lines[place + 1], lines[place + 2 + at]
    if _is_name(face.text):
        return (
            f"{count.number}: {shown(name.text)} has {int(count.text):,} faces, but only {at:,} "
            f"follow before line {face.number}, {shown(face.text)}"
        )
    return f"{face.number}: {shown(face.text)} is not a face, for {shown(name.text)}: expected {_FACE}"
