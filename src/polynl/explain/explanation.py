"""The explanation of one image by one network: its prediction, and the maps that can be drawn of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchvision import tv_tensors

from polynl.errors import SettingsError, near_matches, shortened
from polynl.explain.capture import Box, Capture, Spot, block_of, capture
from polynl.explain.feature_norms import FeatureNorms, norms_at
from polynl.explain.grad_cam import Target, cams_at, detection_score
from polynl.explain.influence import influence_at
from polynl.explain.networks import ExplainedNetwork
from polynl.insertion import inserted


@dataclass(frozen=True)
class Query:
    """What to explain in every image; for the defaults see `polynl explain --help`."""

    target: str | None = None
    position: tuple[float, float] | None = None
    detection: int | None = None
    block: str | None = None
    layer: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What one network predicts for one image, and why; maps are (h, w), or None if there are none."""

    network: ExplainedNetwork
    image: Tensor
    """The uint8 image (3, h, w) that the network sees."""
    label: str | None = None
    """The explained class, or the class of the explained detection; None if a detector found nothing."""
    probability: float | None = None
    box: Box | None = None
    """The explained detection's, in pixels of the image."""
    cam: Tensor | None = None
    """Grad-CAM."""
    block: str | None = None
    """The block that norms and shares refer to, if the network has several."""
    norms: FeatureNorms | None = None
    spot: Spot | None = None
    """Where influence is measured, in pixels of the image."""
    shares: Tensor | None = None
    """The influence map of the spot."""
    notes: tuple[str, ...] = ()
    """Why something is missing."""

    @property
    def said(self) -> str:
        """The prediction as text, such as "disc, 98%"."""
        if self.label is None or self.probability is None:
            return "nothing found"
        return f"{self.label}, {100 * self.probability:.0f}%"

    @property
    def added(self) -> str | None:
        """How much the block adds: the ratio of the norms over the whole map; None without a block."""
        if self.norms is None:
            return None
        x, y = (float(norm.norm()) for norm in self.norms[:2])
        return f"‖Y‖ ÷ ‖X‖ = {y / (x or 1):.2g}" if y > 0 else "nothing, the block is new or untrained"

    @property
    def title(self) -> str:
        """The network's name, and the block if it has several."""
        return self.network.name if self.block is None else f"{self.network.name}, {self.block}"


def explain_image(network: ExplainedNetwork, image: Tensor, query: Query) -> Explanation:
    """Explain a uint8 image (3, h, w); raises a SettingsError if the query does not fit."""
    view = network.view(image)
    spot = None if query.position is None else _position_in_view(network, image, *query.position)
    try:
        return _explain_view(network, view, spot, query)
    except ValueError as error:
        raise SettingsError(f"{network.name}: {error}") from error


def _explain_view(network: ExplainedNetwork, view: Tensor, spot: Spot | None, query: Query) -> Explanation:
    """Two forward passes: one records everything but the gradient of Grad-CAM."""
    images = network.inputs(view)
    block = None if network.block is None else block_of(network.model, query.block)
    captured = capture(
        network.model, images, modules=[] if block is None else [block], map_layers=query.layer is None
    )
    predict = _detection if network.detects else _class
    explanation, target = predict(Explanation(network, view, spot=spot), captured.output[0], query)
    if target is not None:
        layers = captured.map_layers if query.layer is None else [query.layer]
        (cam,) = cams_at(network.model, images, target, layers)
        explanation = replace(explanation, cam=cam, spot=spot or explanation.box or highest(cam, view))
    return explanation if block is None else _with_block(explanation, captured, block)


def _class(explanation: Explanation, logits: Tensor, query: Query) -> tuple[Explanation, Target]:
    """With the class to explain; the target is its score."""
    probabilities, labels = logits.float().softmax(dim=0), explanation.network.labels
    number = int(probabilities.argmax()) if query.target is None else class_number(query.target, labels)
    if not 0 <= number < len(probabilities):
        raise ValueError(f"there is no class {number}: it has {len(probabilities)} classes, numbered from 0")
    label, probability = labels.get(number, f"class {number}"), float(probabilities[number])
    return replace(explanation, label=label, probability=probability), number


def _detection(
    explanation: Explanation, found: Mapping[str, Tensor], query: Query
) -> tuple[Explanation, Target]:
    """With the detection to explain; the target is its score, or None if there is no detection."""
    count, number = len(found["scores"]), 0 if query.detection is None else query.detection
    if count == 0:
        return explanation, None
    if not 0 <= number < count:
        raise ValueError(f"--detection {number}: there are {count} detections, numbered from 0")
    left, top, right, bottom = found["boxes"][number].tolist()
    index, probability = int(found["labels"][number]), float(found["scores"][number])
    label = explanation.network.labels.get(index, f"class {index}")
    detected = replace(explanation, label=label, probability=probability, box=(left, top, right, bottom))
    return detected, detection_score(number)


def _with_block(explanation: Explanation, captured: Capture, name: str) -> Explanation:
    """With the norms of a block and, if there is a spot, its influence map."""
    model = explanation.network.model
    block, activation, frames = model.get_submodule(name), captured.activations[name], captured.frames
    norms = FeatureNorms(*(maps[0] for maps in norms_at(block, activation, frames)))
    several = len(inserted(model)) > 1
    explanation = replace(explanation, block=name if several else None, norms=norms)
    if explanation.spot is None:
        return explanation
    try:
        (shares,) = influence_at(block, activation, frames, [explanation.spot])
    except ValueError as error:
        return replace(explanation, notes=(str(error),))
    return replace(explanation, shares=shares)


def class_number(target: str, labels: Mapping[int, str]) -> int:
    """A class by its name or, if no class has that name, by its number."""
    numbers = [number for number, name in labels.items() if name.lower() == target.lower()]
    if len(numbers) > 1:
        choices = " or ".join(map(str, numbers))
        raise ValueError(f"--target: {len(numbers)} classes are called {target!r}; give a number: {choices}")
    if numbers or target.isdecimal():
        return numbers[0] if numbers else int(target)
    if not labels:
        hint = " Its classes have no names; give a number."
    else:
        near = near_matches(target.lower(), [name.lower() for name in labels.values()])
        hint = near or f" Its classes are {shortened([*labels.values()], 8)}."
    raise ValueError(f"--target: no class is called {target!r}.{hint}")


def highest(cam: Tensor, view: Tensor) -> tuple[float, float]:
    """The center of a map's highest cell in pixels of the view, or the view's center if the map is zero."""
    height, width = view.shape[-2:]
    if not cam.any():
        return width / 2, height / 2
    row, column = divmod(int(cam.argmax()), cam.shape[1])
    return (column + 0.5) * width / cam.shape[1], (row + 0.5) * height / cam.shape[0]


def _position_in_view(network: ExplainedNetwork, image: Tensor, x: float, y: float) -> tuple[float, float]:
    """Where a pixel of the image is in the view that the network sees."""
    height, width = image.shape[-2:]
    if not (0 <= x < width and 0 <= y < height):
        raise SettingsError(
            f"--position {x:g} {y:g} is outside the image, which is {width} wide and {height} high."
        )
    corners = torch.tensor([[x, y, min(x + 1, width), min(y + 1, height)]])
    pixel = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
    _, moved = network.view(tv_tensors.Image(image), pixel)
    left, top, right, bottom = moved[0].tolist()
    if right <= left or bottom <= top:
        raise SettingsError(f"--position {x:g} {y:g} is in a border of the image that {network.name} crops.")
    return (left + right) / 2, (top + bottom) / 2
