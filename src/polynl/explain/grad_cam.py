"""Grad-CAM (Selvaraju 2017): where a network sees what it is asked for, as in the paper's Figure 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polynl.explain.capture import Frame, Images, as_given, look, once
from polynl.insertion import proportional
from polynl.models.pyramid import BODY

Target = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


def grad_cam(model: nn.Module, images: Images, target: Target = None, *, layer: str | None = None) -> Any:
    """ReLU(Σₖ wₖAₖ), wₖ the mean over positions of ∂score/∂Aₖ, for the maps A of a layer: (b, h, w).

    `images`: a batch (b, 3, h, w) as the model takes it; of an image (3, h, w) there is one map, of a list of
    images, which detectors of torchvision take in several sizes, a list of maps without the padding.
    `target`: a class for all images or one for each, the predicted ones unless given; or a function from the
    model's output to a score for each image, such as `detection_score(0)` for detectors.
    `layer`: a module by its dotted name; unless given the last one whose output is a map of several
    positions that the score depends on, in a detector the last such one of its ResNet.
    Values are from 0 on, and their scale means nothing.

    >>> from torchvision.models import resnet18
    >>> grad_cam(resnet18(), torch.randn(2, 3, 64, 96), target=281).shape
    torch.Size([2, 2, 3])
    """
    names = _maps_of(model, images) if layer is None else [layer]
    for name in names:
        found = _gradient_at(name, model, images, target)
        if found is not None:
            break
    else:
        what = "any map of it" if layer is None else f'layer "{layer}"'
        raise ValueError(f"the score does not depend on {what}; choose another layer")
    weights = found.gradient.flatten(2).mean(dim=-1)
    cams = torch.einsum("bc,bc...->b...", weights, found.maps).relu()
    return as_given(images, [frame.cut(cam) for cam, frame in zip(cams, found.frames, strict=True)])


@dataclass(frozen=True)
class _Gradient:
    """Of the score with respect to the maps of a layer."""

    gradient: Tensor
    maps: Tensor
    frames: Sequence[Frame]


def _gradient_at(name: str, model: nn.Module, images: Images, target: Target) -> _Gradient | None:
    """None where the score does not depend on the layer."""
    maps: list[Tensor] = []

    def keep(_: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() < 4:
            raise ValueError(f'layer "{name}" gives {_said(output)}; expected a map (b, c, h, w)')
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
        if not scores.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(scores.sum(), maps, allow_unused=True)
    return None if gradient is None else _Gradient(gradient, maps[0].detach(), frames)


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
        scores = target(output)
        if not isinstance(scores, Tensor) or scores.shape != (images,):
            raise ValueError(
                f"the target gives {_said(scores)}; expected a tensor of {images} scores, one for each image"
            )
        return scores
    if not isinstance(output, Tensor) or output.dim() != 2:
        such = ", such as detection_score(0)" if isinstance(output, list) else ""
        raise ValueError(
            f"the model gives {_said(output)}, not a score for each class: target must be a function from it "
            f"to a score for each image{such}"
        )
    classes = output.argmax(dim=1) if target is None else _classes(target, output)
    if classes.dim() == 1 and len(classes) != images:
        raise ValueError(f"target has {len(classes)} classes for {images} images")
    return output.gather(1, classes.expand(images).unsqueeze(1)).squeeze(1)


def _classes(target: Any, output: Tensor) -> Tensor:
    try:
        classes = torch.as_tensor(target, device=output.device)
    except (TypeError, ValueError, RuntimeError):
        classes = torch.tensor(False)
    known = classes.dim() < 2 and classes.dtype not in (
        torch.bool,
        torch.float16,
        torch.float32,
        torch.float64,
    )
    if not known or ((classes < 0) | (classes >= output.shape[1])).any():
        raise ValueError(f"target={target}: the model has classes from 0 to {output.shape[1] - 1}")
    return classes.long()


def _said(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"{type(model).__name__} has no module {name!r}; it has {', '.join(model._modules)}")
    return modules[name]


def _maps_of(model: nn.Module, images: Images) -> list[str]:
    """The names of all modules that gave a map of several positions, the last one first.

    What is no map, tokens or a map with the channels last, has not the proportions of the input.
    """
    body = BODY if BODY in dict(model.named_modules()) else ""
    module = model.get_submodule(body)
    spatial: list[torch.Size] = []
    found: dict[str, None] = {}

    def watcher(name: str) -> Callable[..., None]:
        def watch(_: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or output.dim() != len(spatial[0]) + 2:
                return
            if output.shape[2:].numel() > 1 and proportional(output.shape[-2:], spatial[0][-2:]):
                found.pop(name, None)
                found[name] = None

        return watch

    with ExitStack() as stack:
        seen = module.register_forward_pre_hook(lambda _, args: spatial.append(args[0].shape[2:]))
        stack.callback(seen.remove)
        for name, part in module.named_modules(prefix=body):
            # The whole model's output may be a map too, and attention of a square map is square.
            if part is not model and not isinstance(part, nn.Softmax | nn.Dropout):
                stack.callback(part.register_forward_hook(watcher(name)).remove)
        stack.enter_context(torch.no_grad())
        look(model, images)
    if not found:
        raise ValueError(
            f"no module of {type(model).__name__} gives a map of several positions: name a layer"
        )
    return list(reversed(found))
