"""Grad-CAM (Selvaraju 2017): where a network sees what it is asked for, as in the paper's Figure 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from polynl.explain.watching import Images, as_given, look, once
from polynl.models.pyramids import BODY

Target = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


def grad_cam(model: nn.Module, images: Images, target: Target = None, *, layer: str | None = None) -> Any:
    """ReLU(Σₖ wₖAₖ), wₖ the mean over positions of ∂score/∂Aₖ, for the maps A of a layer: (b, h, w).

    `images`: a batch (b, 3, h, w) as the model takes it; of an image (3, h, w) there is one map, of a list of
    images, which detectors of torchvision take in several sizes, a list of maps without the padding.
    `target`: a class for all images or one for each, the predicted ones unless given; or a function from the
    model's output to a score for each image, such as `detection_score(0)` for detectors.
    `layer`: a module by its dotted name; unless given the last one whose output is a map of several
    positions, in a detector the last such one of its ResNet.
    Values are from 0 on, and their scale means nothing.

    >>> from torchvision.models import resnet18
    >>> grad_cam(resnet18(), torch.randn(2, 3, 64, 96), target=281).shape
    torch.Size([2, 2, 3])
    """
    name = _last_map(model, images) if layer is None else layer
    maps: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() < 4:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f'layer "{name}" gives {got}; expected a map (b, c, h, w)')
        maps.append(output.detach().requires_grad_())
        # What comes before needs no gradient; what comes after may write into its input.
        return maps[-1].clone()

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        stack.callback(_module(model, name).register_forward_hook(keep).remove)
        output, frames = look(model, images)
        once(maps, name)
        scores = _scores(output, target, len(frames))
        gradient = None
        if scores.requires_grad:
            (gradient,) = torch.autograd.grad(scores.sum(), maps, allow_unused=True)
        if gradient is None:
            raise ValueError(f'the score does not depend on layer "{name}"; choose another one')
    weights = gradient.flatten(2).mean(dim=-1)
    cams = torch.einsum("bc,bc...->b...", weights, maps[0].detach()).relu()
    return as_given(images, [frame.cut(cam) for cam, frame in zip(cams, frames, strict=True)])


def detection_score(number: int | Sequence[int]) -> Callable[[Any], Tensor]:
    """A target of `grad_cam`: the score of a detection, by its place in what a detector finds in an image."""

    def scores(found: Sequence[dict[str, Tensor]]) -> Tensor:
        numbers = [number] * len(found) if isinstance(number, int) else number
        if len(numbers) != len(found):
            raise ValueError(f"target has {len(numbers)} detections for {len(found)} images")
        for index, (entry, wanted) in enumerate(zip(found, numbers, strict=True)):
            if not 0 <= wanted < len(entry["scores"]):
                count = len(entry["scores"])
                raise ValueError(f"there is no detection {wanted} in image {index}: {count} are found in it")
        return torch.stack([entry["scores"][n] for entry, n in zip(found, numbers, strict=True)])

    return scores


def _scores(output: Any, target: Target, images: int) -> Tensor:
    if callable(target):
        return target(output)
    if not isinstance(output, Tensor) or output.dim() != 2:
        raise ValueError(
            f"the model gives {type(output).__name__}, not a score for each class: "
            "target must be a function of it, such as detection_score(0)"
        )
    classes = output.argmax(dim=1) if target is None else torch.as_tensor(target, device=output.device)
    if classes.dim() == 1 and len(classes) != images:
        raise ValueError(f"target has {len(classes)} classes for {images} images")
    if classes.is_floating_point() or ((classes < 0) | (classes >= output.shape[1])).any():
        raise ValueError(f"target={target}: the model has classes from 0 to {output.shape[1] - 1}")
    return output.gather(1, classes.expand(images).unsqueeze(1)).squeeze(1)


def _module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"{type(model).__name__} has no module {name!r}; it has {', '.join(model._modules)}")
    return modules[name]


def _last_map(model: nn.Module, images: Images) -> str:
    """The name of the last module that gave a map of several positions."""
    body = BODY if _has(model, BODY) else ""
    last = ""

    def watcher(name: str) -> Callable[..., None]:
        def watch(_: nn.Module, args: Any, output: Any) -> None:
            nonlocal last
            if isinstance(output, Tensor) and output.dim() > 3 and output.shape[2:].numel() > 1:
                last = name

        return watch

    with ExitStack() as stack:
        for name, module in model.get_submodule(body).named_modules(prefix=body):
            if module is not model:  # whose output may be a map too, but is not one to look into
                stack.callback(module.register_forward_hook(watcher(name)).remove)
        stack.enter_context(torch.no_grad())
        look(model, images)
    if not last:
        raise ValueError(
            f"no module of {type(model).__name__} gives a map of several positions: name a layer"
        )
    return last


def _has(model: nn.Module, name: str) -> bool:
    return any(found == name for found, _ in model.named_modules())
