"""One forward pass, recorded: the output, where images lie on feature maps, and activations of modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from polynl.blocks.base import Block, layers_of_blocks
from polynl.errors import near_matches
from polynl.insertion import at_rest, inserted, proportional
from polynl.models.pyramid import BODY

Call = TypeVar("Call")
Images = Tensor | Sequence[Tensor]
Box = tuple[float, float, float, float]
# A point x, y or a box left, top, right, bottom in pixels.
Spot = tuple[float, float] | Box


@dataclass(frozen=True)
class Frame:
    """The part of a feature map that shows an image: detectors pad images on the right and at the bottom."""

    height: int
    width: int
    covered: tuple[float, float] = (1.0, 1.0)
    """The fractions of a map's height and width."""

    def crop(self, values: Tensor) -> Tensor:
        """A map (..., h, w) without the padding."""
        return values[(..., *self.cells((0, 0, self.width, self.height), values.shape[-2:]))]

    def cells(self, spot: Spot, shape: Sequence[int]) -> tuple[slice, slice]:
        """The rows and columns of a map of that shape that a spot touches; a box is clipped to the image."""
        outside = f"is outside the image, which is {self.width} wide and {self.height} high"
        left, top, *_ = spot
        right, bottom = spot[-2:]
        if len(spot) == 2 and not (0 <= left < self.width and 0 <= top < self.height):
            raise ValueError(f"position {left:g}, {top:g} {outside}")
        if len(spot) == 4 and not (left < right and top < bottom):
            raise ValueError(f"box {spot} is empty; expected left, top, right, bottom in pixels")
        if len(spot) == 4 and (right <= 0 or bottom <= 0 or left >= self.width or top >= self.height):
            raise ValueError(f"box {spot} {outside}")
        rows, columns = (part * size for part, size in zip(self.covered, shape, strict=True))
        return (
            _span(top / self.height, bottom / self.height, rows),
            _span(left / self.width, right / self.width, columns),
        )


def _span(start: float, stop: float, cells: float) -> slice:
    """The cells, at least one, between two fractions of an axis that is that many cells long."""
    # Rounded, because products of fractions miss whole numbers by an error in their last digits.
    first, last, end = (round(min(max(part, 0.0), 1.0) * cells, 6) for part in (start, stop, 1.0))
    cell = max(0, min(int(first), math.ceil(end) - 1))
    return slice(cell, max(cell + 1, math.ceil(last)))


@dataclass(frozen=True)
class Activation:
    """Input and output of a module."""

    input: Tensor
    output: Tensor
    mask: Tensor | None = None
    """The mask that a block got, which leaves the padding of a detector's images out."""


@dataclass(frozen=True)
class Capture:
    """What one forward pass recorded."""

    output: Any
    """The model's output."""
    frames: list[Frame]
    """For each image, where it lies on feature maps."""
    activations: dict[str, Activation]
    """By module name."""
    map_layers: list[str]
    """Modules whose output is a map of several positions, last first."""


def capture(
    model: nn.Module, images: Images, *, modules: Sequence[str] = (), map_layers: bool = False
) -> Capture:
    """Run the model once, without gradients and in eval mode.

    `modules`: the modules whose input and output to keep; each must be called once.
    `map_layers`: whether to list the layers that Grad-CAM can use.
    """
    calls: dict[str, list[Activation]] = {name: [] for name in modules}
    layers: dict[str, None] = {}
    with ExitStack() as stack:
        for name, made in calls.items():
            hook = partial(_record, made)
            stack.enter_context(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        if map_layers:
            for handle in _record_map_layers(model, layers):
                stack.enter_context(handle)
        stack.enter_context(torch.no_grad())
        output, frames = forward(model, images)
    activations = {name: only_call(made, name) for name, made in calls.items()}
    return Capture(output, frames, activations, list(reversed(layers)))


def _record(
    calls: list[Activation], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    x = (*args, *kwargs.values())[0]
    # Copies, because later modules may write into their input.
    calls.append(Activation(x.clone(), output.clone(), kwargs.get("mask")))


def _record_map_layers(model: nn.Module, layers: dict[str, None]) -> Iterator[RemovableHandle]:
    """Hooks that list the modules whose output is a map of several positions, in the order of last calls.

    In a detector these are modules of its body. Tokens and maps with the channels last do not have the
    proportions of the input and are left out.
    """
    body = BODY if BODY in dict(model.named_modules()) else ""
    module = model.get_submodule(body)
    spatial: list[torch.Size] = []

    def record(name: str, _: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.dim() != len(spatial[0]) + 2:
            return
        if output.shape[2:].numel() > 1 and proportional(output.shape[-2:], spatial[0][-2:]):
            layers.pop(name, None)
            layers[name] = None

    # Of the backbone, which need not call the network in it as a whole.
    entered = model.get_submodule(body.rpartition(".")[0])
    yield entered.register_forward_pre_hook(lambda _, args: spatial.append(args[0].shape[2:]))
    inside = layers_of_blocks(module)
    for name, part in module.named_modules(prefix=body):
        # The output of the whole model may be a map too, and the attention of a square map is square.
        if part is not model and part not in inside and not isinstance(part, nn.Softmax | nn.Dropout):
            yield part.register_forward_hook(partial(record, name))


def forward(model: nn.Module, images: Images) -> tuple[Any, list[Frame]]:
    """The output in eval mode, and where the images lie on feature maps; the model's mode is restored.

    `images` is a batch (b, 3, h, w), an image (3, h, w) or a list of images, on any device; torchvision's
    detectors take lists of images of different sizes.
    """
    if len(images) == 0:
        raise ValueError("images is empty")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with at_rest(model):
        if is_detector(model):
            return _detector_forward(model, [_to_device(image, device) for image in _image_list(images)])
        batch = _to_device(_batch(images), device)
        height, width = batch.shape[-2:]
        return model(batch), [Frame(height, width)] * len(batch)


def is_detector(model: nn.Module) -> bool:
    """Whether the model has the interface of torchvision's detectors."""
    return isinstance(getattr(model, "transform", None), GeneralizedRCNNTransform)


def _detector_forward(model: Any, images: Sequence[Tensor]) -> tuple[Any, list[Frame]]:
    """The output, and frames from how the detector's transform has resized and padded the images."""
    frames: list[Frame] = []

    def record(_: nn.Module, args: Any, output: Any) -> None:
        resized, (padded_height, padded_width) = output[0].image_sizes, output[0].tensors.shape[-2:]
        for image, (height, width) in zip(images, resized, strict=True):
            covered = height / padded_height, width / padded_width
            frames.append(Frame(image.shape[-2], image.shape[-1], covered))

    with model.transform.register_forward_hook(record):
        return model(list(images)), frames


def _to_device(images: Tensor, device: torch.device) -> Tensor:
    """On the device; tensors of inference mode are copied, since autograd cannot use them."""
    moved = images.to(device)
    return moved.clone() if moved.is_inference() else moved


def _image_list(images: Images) -> list[Tensor]:
    listed = [images] if isinstance(images, Tensor) and images.dim() == 3 else list(images)
    for image in listed:
        if image.dim() != 3:
            raise ValueError(f"an image has the shape {tuple(image.shape)}; expected (3, h, w)")
    return listed


def _batch(images: Images) -> Tensor:
    if isinstance(images, Tensor) and images.dim() != 3:
        if images.dim() < 3:
            raise ValueError(
                f"images has the shape {tuple(images.shape)}; expected (b, 3, h, w) or (3, h, w)"
            )
        return images
    listed = _image_list(images)
    shapes = {tuple(image.shape) for image in listed}
    if len(shapes) != 1:
        different = " and ".join(map(str, sorted(shapes)))
        raise ValueError(f"images have the shapes {different}; a batch needs one: pass them one by one")
    return torch.stack(listed)


def only_call(calls: Sequence[Call], name: str) -> Call:
    """The record of a module's only call; a ValueError if it was not called exactly once."""
    if len(calls) != 1:
        times = f"{len(calls)} times" if calls else "never"
        raise ValueError(f'"{name}" is called {times} in a forward pass; choose a module that is called once')
    return calls[0]


def block_of(model: nn.Module, name: str | None = None) -> str:
    """The dotted name of a block, given that name or that of the module it stands at; default: the first."""
    blocks = inserted(model)
    # If two stand at one module, the module's name means the first.
    places = {block.rpartition("polynl_")[0].removesuffix("."): block for block in reversed(blocks)}
    blocks |= {found: module for found, module in model.named_modules() if isinstance(module, Block)}
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no block; add one with polynl.insert")
    if name is None:
        return next(iter(blocks))
    if name in blocks or name in places:
        return name if name in blocks else places[name]
    hint = near_matches(name, [*blocks, *places])
    raise ValueError(f"no block is called {name!r}.{hint} Available: {', '.join(blocks)}")


def like_images(images: Images, maps: Sequence[Tensor]) -> Any:
    """A list of maps for a list of images, a batch for a batch, and one map for one image."""
    if not isinstance(images, Tensor):
        return list(maps)
    return maps[0] if images.dim() == 3 else torch.stack(list(maps))
