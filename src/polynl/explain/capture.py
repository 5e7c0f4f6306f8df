"""What passes a module of a network while it looks at images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from polynl.blocks.base import Block
from polynl.errors import near_matches
from polynl.insertion import at_rest, inserted

Images = Tensor | Sequence[Tensor]
Box = tuple[float, float, float, float]
# A point x, y or a box left, top, right, bottom in pixels.
Spot = tuple[float, float] | Box


@dataclass(frozen=True)
class Frame:
    """Where an image lies on the maps of a network: detectors pad images at the right and at the bottom."""

    height: int
    width: int
    covered: tuple[float, float] = (1.0, 1.0)
    """The part of a map's height and of its width."""

    def cut(self, values: Tensor) -> Tensor:
        """A map (h, w) without the padding."""
        rows, columns = self._spans((0, 0, self.width, self.height), values.shape[-2:])
        return values[..., rows, columns]

    def cell(self, x: float, y: float, shape: Sequence[int]) -> tuple[int, int]:
        """The row and column, on a map of that shape, of a point in pixels."""
        if not (0 <= x < self.width and 0 <= y < self.height):
            raise ValueError(f"position {x:g}, {y:g} is outside the image, which is {self._said()}")
        rows, columns = self._spans((x, y, x, y), shape)
        return rows.start, columns.start

    def cells(self, box: Box, shape: Sequence[int]) -> tuple[slice, slice]:
        """The rows and columns that a box in pixels touches; what is outside the image is cut off."""
        left, top, right, bottom = box
        if not (left < right and top < bottom):
            raise ValueError(f"box {box} is empty; expected left, top, right, bottom in pixels")
        if right <= 0 or bottom <= 0 or left >= self.width or top >= self.height:
            raise ValueError(f"box {box} is outside the image, which is {self._said()}")
        return self._spans(box, shape)

    def _said(self) -> str:
        return f"{self.width} wide and {self.height} high"

    def _spans(self, box: Box, shape: Sequence[int]) -> tuple[slice, slice]:
        left, top, right, bottom = box
        rows, columns = (part * size for part, size in zip(self.covered, shape, strict=True))
        return (
            _span(top / self.height, bottom / self.height, rows),
            _span(left / self.width, right / self.width, columns),
        )


def _span(start: float, stop: float, cells: float) -> slice:
    """From one part of an axis to another, where the axis takes so many cells; one at least."""
    # Rounded, since products of fractions miss whole numbers by an error in their last digits.
    first, last, end = (round(min(max(part, 0.0), 1.0) * cells, 6) for part in (start, stop, 1.0))
    cell = max(0, min(int(first), math.ceil(end) - 1))
    return slice(cell, max(cell + 1, math.ceil(last)))


@dataclass(frozen=True)
class Passed:
    """What a module got and gave."""

    x: Tensor
    z: Tensor


def passed(model: nn.Module, images: Images, name: str) -> tuple[Passed, list[Frame]]:
    """What a named module got and gave when the model looked at images, and where these lie on its maps."""
    seen: list[Passed] = []

    def watch(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        x = (*args, *named.values())[0]
        # Copies, since what comes after may write into its input.
        seen.append(Passed(x.clone(), output.clone()))

    with ExitStack() as stack:
        stack.callback(model.get_submodule(name).register_forward_hook(watch, with_kwargs=True).remove)
        stack.enter_context(torch.no_grad())
        _, frames = look(model, images)
    once(seen, name)
    return seen[0], frames


def look(model: nn.Module, images: Images) -> tuple[Any, list[Frame]]:
    """The output for images on the model's device, in eval mode, and where they lie on its maps.

    `images` is a batch (b, 3, h, w), or an image (3, h, w), or a list of images: of a detector of torchvision
    they may differ in size.
    """
    if len(images) == 0:
        raise ValueError("there are no images to look at")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with at_rest(model):
        if finds_boxes(model):
            return _detected(model, [_moved(image, device) for image in _listed(images)])
        batch = _moved(_batched(images), device)
        height, width = batch.shape[-2:]
        return model(batch), [Frame(height, width)] * len(batch)


def finds_boxes(model: nn.Module) -> bool:
    """Whether it is a detector with torchvision's interface."""
    return isinstance(getattr(model, "transform", None), GeneralizedRCNNTransform)


def _detected(model: Any, images: Sequence[Tensor]) -> tuple[Any, list[Frame]]:
    """The output of a detector, whose transform says how it has resized and padded the images."""
    frames: list[Frame] = []

    def watch(_: nn.Module, args: Any, output: Any) -> None:
        resized, (padded_height, padded_width) = output[0].image_sizes, output[0].tensors.shape[-2:]
        for image, (height, width) in zip(images, resized, strict=True):
            covered = height / padded_height, width / padded_width
            frames.append(Frame(image.shape[-2], image.shape[-1], covered))

    with ExitStack() as stack:
        stack.callback(model.transform.register_forward_hook(watch).remove)
        output = model(list(images))
    return output, frames


def _moved(images: Tensor, device: torch.device) -> Tensor:
    """On the device; of what was made in inference mode a copy, without which there would be no gradients."""
    moved = images.to(device)
    return moved.clone() if moved.is_inference() else moved


def _listed(images: Images) -> list[Tensor]:
    listed = [images] if isinstance(images, Tensor) and images.dim() == 3 else list(images)
    for image in listed:
        if image.dim() != 3:
            raise ValueError(f"an image has the shape {tuple(image.shape)}; expected (3, h, w)")
    return listed


def _batched(images: Images) -> Tensor:
    if isinstance(images, Tensor) and not _alone(images):
        if images.dim() < 3:
            raise ValueError(
                f"images has the shape {tuple(images.shape)}; expected (b, 3, h, w) or (3, h, w)"
            )
        return images
    listed = _listed(images)
    shapes = {tuple(image.shape) for image in listed}
    if len(shapes) != 1:
        said = " and ".join(map(str, sorted(shapes)))
        raise ValueError(f"images have the shapes {said}; a batch needs one: look at them one by one")
    return torch.stack(listed)


def _alone(images: Images) -> bool:
    """Whether it is one image, and no batch or list."""
    return isinstance(images, Tensor) and images.dim() == 3


def once(seen: Sequence[Any], name: str) -> None:
    """Raise a ValueError unless a module was called once."""
    if len(seen) != 1:
        times = "never" if not seen else f"{len(seen)} times"
        raise ValueError(f'"{name}" is called {times} in one look at images; choose one that is called once')


def block_of(model: nn.Module, name: str | None = None) -> str:
    """The dotted name of a block in the model, of the first unless one or the place of one is named."""
    blocks = inserted(model)
    # Of two at one module the first.
    places = {block.rpartition("polynl_")[0].removesuffix("."): block for block in reversed(blocks)}
    blocks |= {found: module for found, module in model.named_modules() if isinstance(module, Block)}
    if not blocks:
        raise ValueError(f"the {type(model).__name__} has no block: polynl.insert puts one in")
    if name is None:
        return next(iter(blocks))
    if name in blocks or name in places:
        return name if name in blocks else places[name]
    hint = near_matches(name, [*blocks, *places])
    raise ValueError(f"no block is called {name!r}.{hint} There are: {', '.join(blocks)}")


def as_given(images: Images, maps: Sequence[Tensor]) -> Any:
    """Maps of a list of images as a list, of a batch as a batch, of an image as one map."""
    if _alone(images):
        return maps[0]
    return torch.stack(list(maps)) if isinstance(images, Tensor) else list(maps)
