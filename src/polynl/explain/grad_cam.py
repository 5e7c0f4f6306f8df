"""Grad-CAM (Selvaraju 2017): the regions that support a score, as in the paper's Figure 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polynl.errors import shortened
from polynl.explain.capture import Images, capture, forward, like_images, only_call

Target = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None


def grad_cam(model: nn.Module, images: Images, target: Target = None, *, layer: str | None = None) -> Any:
    """ReLU(Σₖ wₖAₖ), wₖ the mean over positions of ∂score/∂Aₖ, for the maps A of a layer: (b, h, w).

    `images`: a batch (b, 3, h, w) as the model takes it. For an image (3, h, w) the result is one map, for a
    list of images, which torchvision's detectors take in different sizes, a list of maps without the padding.
    `target`: a class for all images or one for each (default: the predicted ones), or a function from the
    model's output to a score for each image, such as `detection_score(0)` for detectors.
    `layer`: dotted name of a module (default: the last one whose output is a map of several positions that
    the score depends on; in a detector, the last such module of its ResNet).
    Values are nonnegative; their scale has no meaning.

    >>> from torchvision.models import resnet18
    >>> grad_cam(resnet18(), torch.randn(2, 3, 64, 96), target=281).shape
    torch.Size([2, 2, 3])
    """
    layers = capture(model, images, map_layers=True).map_layers if layer is None else [layer]
    return like_images(images, cams_at(model, images, target, layers))


def cams_at(model: nn.Module, images: Images, target: Target, layers: Sequence[str]) -> list[Tensor]:
    """For each image, Grad-CAM at the first of the layers that the score depends on."""
    if not layers:
        raise ValueError(
            f"no module of {type(model).__name__} outputs a map of several positions; choose a layer"
        )
    for layer in layers:
        cams = _cams(layer, model, images, target)
        if cams is not None:
            return cams
    raise ValueError(f"the score does not depend on {shortened(layers)}; choose another layer")


def _cams(layer: str, model: nn.Module, images: Images, target: Target) -> list[Tensor] | None:
    """None if the score does not depend on the layer."""
    maps: list[Tensor] = []

    def detach(_: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() < 4:
            raise ValueError(f'layer "{layer}" outputs {_described(output)}; expected a map (b, c, h, w)')
        maps.append(output.detach().requires_grad_())
        # Earlier modules need no gradient; later ones may write into their input.
        return maps[-1].clone()

    hook = _module(model, layer).register_forward_hook(detach)
    with hook, torch.inference_mode(mode=False), torch.enable_grad():
        output, frames = forward(model, images)
        only_call(maps, layer)
        scores = _scores(output, target, len(frames))
        if not scores.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(scores.sum(), maps, allow_unused=True)
    if gradient is None:
        return None
    cams = torch.einsum("bc,bc...->b...", gradient.flatten(2).mean(dim=-1), maps[0].detach()).relu()
    return [frame.crop(cam) for cam, frame in zip(cams, frames, strict=True)]


def detection_score(number: int | Sequence[int]) -> Callable[[Any], Tensor]:
    """A target of `grad_cam`: the score of one of the detections in an image, by its index."""

    def scores(found: Sequence[dict[str, Tensor]]) -> Tensor:
        numbers = [number] * len(found) if isinstance(number, int) else number
        if len(numbers) != len(found):
            raise ValueError(f"target has {len(numbers)} detections for {len(found)} images")
        for index, (entry, wanted) in enumerate(zip(found, numbers, strict=True)):
            count = len(entry["scores"])
            if not 0 <= wanted < count:
                raise ValueError(f"there is no detection {wanted} in image {index}, which has {count}")
        return torch.stack([entry["scores"][n] for entry, n in zip(found, numbers, strict=True)])

    return scores


def _scores(output: Any, target: Target, images: int) -> Tensor:
    if callable(target):
        scores = target(output)
        if not isinstance(scores, Tensor) or scores.shape != (images,):
            raise ValueError(
                f"the target returns {_described(scores)}; expected {images} scores, one for each image"
            )
        return scores
    if not isinstance(output, Tensor) or output.dim() != 2:
        such = ", such as detection_score(0)" if isinstance(output, list) else ""
        raise ValueError(
            f"the model outputs {_described(output)}, not a score for each class; target must be a function "
            f"from it to a score for each image{such}"
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
    whole = not classes.is_floating_point() and classes.dtype != torch.bool
    if not whole or classes.dim() > 1 or ((classes < 0) | (classes >= output.shape[1])).any():
        raise ValueError(f"target={target}: the model has classes from 0 to {output.shape[1] - 1}")
    return classes.long()


def _described(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"{type(model).__name__} has no module {name!r}; it has {', '.join(model._modules)}")
    return modules[name]
