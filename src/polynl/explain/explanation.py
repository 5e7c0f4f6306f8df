"""One look of one network at one image: what it says, and all maps of it that can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors

from polynl.errors import SettingsError, near_matches
from polynl.explain.capture import Box, Spot, block_of, look
from polynl.explain.feature_norms import FeatureNorms, feature_norms
from polynl.explain.grad_cam import detection_score, grad_cam
from polynl.explain.maps import influence_map
from polynl.explain.networks import Subject
from polynl.insertion import inserted


@dataclass(frozen=True)
class Question:
    """What is asked of every network about an image; None: what `polynl explain --help` says."""

    target: str | None = None
    position: tuple[float, float] | None = None
    detection: int | None = None
    block: str | None = None
    layer: str | None = None


@dataclass(frozen=True)
class Answer:
    """What one network says of one image; maps are (h, w), and None where it has none."""

    subject: Subject
    picture: Tensor
    """The uint8 image (3, h, w) that the network sees."""
    said: str
    """The class or detection that it is about, and how sure the network is."""
    box: Box | None = None
    """That of the detection, in pixels of the picture."""
    cam: Tensor | None = None
    """Grad-CAM."""
    block: str | None = None
    """The one that the rest is about, where there are several to choose from."""
    norms: FeatureNorms | None = None
    spot: Spot | None = None
    """In pixels of the picture."""
    shares: Tensor | None = None
    """The influence map of the spot."""
    remarks: tuple[str, ...] = ()
    """Why something is missing."""

    @property
    def title(self) -> str:
        """The network, and the block if it has several."""
        return self.subject.name if self.block is None else f"{self.subject.name}, {self.block}"


def answer(subject: Subject, image: Tensor, question: Question) -> Answer:
    """Look at a uint8 image (3, h, w); a SettingsError says what cannot be asked."""
    picture = subject.view(image)
    spot = None if question.position is None else _seen_at(subject, image, *question.position)
    try:
        if subject.detects:
            return _of_detector(subject, picture, spot, question)
        return _of_classifier(subject, picture, spot, question)
    except ValueError as error:
        raise SettingsError(f"{subject.name}: {error}") from error


def _of_classifier(
    subject: Subject, picture: Tensor, spot: tuple[float, float] | None, question: Question
) -> Answer:
    inputs = subject.inputs(picture)
    with torch.no_grad():
        logits, _ = look(subject.model, inputs)
    sure = logits[0].float().softmax(dim=0)
    number = int(sure.argmax()) if question.target is None else class_number(question.target, subject.labels)
    if not 0 <= number < len(sure):
        raise ValueError(f"there is no class {number}: it tells {len(sure)} apart, counted from 0")
    cam = grad_cam(subject.model, inputs, number, layer=question.layer)[0]
    said = f"{subject.labels.get(number, f'class {number}')}, {100 * sure[number]:.0f}%"
    spot = _strongest(cam, picture) if spot is None else spot
    return _with_block(Answer(subject, picture, said, cam=cam), inputs, spot, question)


def _of_detector(
    subject: Subject, picture: Tensor, spot: tuple[float, float] | None, question: Question
) -> Answer:
    inputs = subject.inputs(picture)
    with torch.no_grad():
        (found,), _ = look(subject.model, inputs)
    count, wanted = len(found["scores"]), 0 if question.detection is None else question.detection
    if count == 0:
        return _with_block(Answer(subject, picture, "nothing found"), inputs, spot, question)
    if not 0 <= wanted < count:
        raise ValueError(f"--detection {wanted}: it finds {count}, counted from 0")
    label, score = (found[key][wanted].item() for key in ("labels", "scores"))
    cam = grad_cam(subject.model, inputs, detection_score(wanted), layer=question.layer)[0]
    left, top, right, bottom = found["boxes"][wanted].tolist()
    box = left, top, right, bottom
    said = f"{subject.labels.get(int(label), f'class {label}')}, {100 * score:.0f}%"
    return _with_block(
        Answer(subject, picture, said, box, cam), inputs, box if spot is None else spot, question
    )


def _with_block(answer: Answer, inputs: Any, spot: Spot | None, question: Question) -> Answer:
    """The answer, with what its block does; without a spot there is no influence on it."""
    subject = answer.subject
    answer = replace(answer, spot=spot)
    if subject.block is None:
        return answer
    name = block_of(subject.model, question.block)
    norms = feature_norms(subject.model, inputs, block=name)
    several = len(inserted(subject.model)) > 1
    answer = replace(
        answer, block=name if several else None, norms=FeatureNorms(*(maps[0] for maps in norms))
    )
    if spot is None:
        return answer
    try:
        shares = influence_map(subject.model, inputs, spot, block=name)[0]
    except ValueError as error:
        return replace(answer, remarks=(*answer.remarks, str(error)))
    return replace(answer, shares=shares)


def class_number(target: str, labels: Mapping[int, str]) -> int:
    """A class by its name or, where none is called so, by its number."""
    numbers = [number for number, name in labels.items() if name.lower() == target.lower()]
    if len(numbers) > 1:
        which = " or ".join(map(str, numbers))
        raise ValueError(f"--target: {len(numbers)} classes are called {target!r}; give a number: {which}")
    if numbers:
        return numbers[0]
    if target.isdecimal():
        return int(target)
    names = [name.lower() for name in labels.values()]
    hint = near_matches(target.lower(), names) if names else " Its classes have no names here."
    raise ValueError(f"--target: no class is called {target!r}.{hint}")


def _strongest(cam: Tensor, picture: Tensor) -> tuple[float, float]:
    """The middle of the cell where a map is highest, in pixels of the picture; of the picture if it is 0."""
    height, width = picture.shape[-2:]
    if not cam.any():
        return width / 2, height / 2
    row, column = divmod(int(cam.argmax()), cam.shape[1])
    return (column + 0.5) * width / cam.shape[1], (row + 0.5) * height / cam.shape[0]


def _seen_at(subject: Subject, image: Tensor, x: float, y: float) -> tuple[float, float]:
    """Where a pixel of the image is in what the network sees."""
    height, width = image.shape[-2:]
    if not (0 <= x < width and 0 <= y < height):
        raise SettingsError(
            f"--position {x:g} {y:g} is outside the image, which is {width} wide and {height} high."
        )
    corners = torch.tensor([[x, y, min(x + 1, width), min(y + 1, height)]])
    pixel = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
    _, moved = subject.view(tv_tensors.Image(image), pixel)
    left, top, right, bottom = moved[0].tolist()
    if right <= left or bottom <= top:
        raise SettingsError(
            f"--position {x:g} {y:g} is at a border of the image that {subject.name} does not see."
        )
    return (left + right) / 2, (top + bottom) / 2
