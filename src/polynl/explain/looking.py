"""One look of one network at one image: what it says, and all maps of it that can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors

from polynl.errors import SettingsError, near_matches
from polynl.explain.feature_norms import FeatureNorms, feature_norms
from polynl.explain.grad_cam import detection_score, grad_cam
from polynl.explain.maps import influence_map
from polynl.explain.subjects import Subject
from polynl.explain.watching import Box, block_of, look

Spot = tuple[float, float] | Box


@dataclass(frozen=True)
class Question:
    """What is asked of every network about an image; None: what `polynl explain --help` says."""

    target: str | None = None
    position: tuple[float, float] | None = None
    detection: int = 0
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
    cam: Tensor | None = None
    """Grad-CAM."""
    norms: FeatureNorms | None = None
    spot: Spot | None = None
    """In pixels of the picture."""
    shares: Tensor | None = None
    """The influence map of the spot."""
    remarks: tuple[str, ...] = ()
    """Why something is missing."""

    @property
    def box(self) -> Box | None:
        """That of the detection."""
        return self.spot if self.spot is not None and len(self.spot) == 4 else None


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
    return _with_block(Answer(subject, picture, said, cam), inputs, spot, question)


def _of_detector(
    subject: Subject, picture: Tensor, spot: tuple[float, float] | None, question: Question
) -> Answer:
    inputs = subject.inputs(picture)
    with torch.no_grad():
        (found,), _ = look(subject.model, inputs)
    count = len(found["scores"])
    if count == 0:
        nothing = Answer(subject, picture, "nothing found", remarks=("it finds nothing",))
        return nothing if spot is None else _with_block(nothing, inputs, spot, question)
    if not 0 <= question.detection < count:
        raise ValueError(f"--detection {question.detection}: it finds {count}, counted from 0")
    label, score = (found[key][question.detection].item() for key in ("labels", "scores"))
    cam = grad_cam(subject.model, inputs, detection_score(question.detection), layer=question.layer)[0]
    left, top, right, bottom = found["boxes"][question.detection].tolist()
    where = (left, top, right, bottom) if spot is None else spot
    said = f"{subject.labels.get(int(label), f'class {label}')}, {100 * score:.0f}%"
    return _with_block(Answer(subject, picture, said, cam), inputs, where, question)


def _with_block(answer: Answer, inputs: Any, spot: Spot, question: Question) -> Answer:
    """The answer, with what its block does."""
    subject = answer.subject
    answer = replace(answer, spot=spot)
    if subject.block is None:
        return answer
    name = block_of(subject.model, question.block)
    norms = feature_norms(subject.model, inputs, block=name)
    answer = replace(answer, norms=FeatureNorms(*(maps[0] for maps in norms)))
    try:
        shares = influence_map(subject.model, inputs, spot, block=name)[0]
    except ValueError as error:
        return replace(answer, remarks=(*answer.remarks, str(error)))
    return replace(answer, shares=shares)


def class_number(target: str, labels: Mapping[int, str]) -> int:
    """A class by its number or by its name."""
    if target.isdecimal():
        return int(target)
    numbers = {name.lower(): number for number, name in labels.items()}
    if target.lower() not in numbers:
        hint = near_matches(target.lower(), numbers) if numbers else " Its classes have no names here."
        raise ValueError(f"--target: no class is called {target!r}.{hint}")
    return numbers[target.lower()]


def _strongest(cam: Tensor, picture: Tensor) -> tuple[float, float]:
    """The middle of the cell where a map is highest, in pixels of the picture."""
    row, column = divmod(int(cam.argmax()), cam.shape[1])
    height, width = picture.shape[-2:]
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
