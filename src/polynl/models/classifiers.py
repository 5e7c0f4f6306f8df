"""ResNets, torchvision's and a small one, with blocks at the paper's places."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from polynl.models.insert import insert
from polynl.models.small_resnet import SmallResNet
from polynl.models.weights import load_weights

TORCHVISION_ARCHS = ("resnet*", "resnext*", "wide_resnet*")
# The stages of each placement; the block goes right before the last residual block of a stage.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "res3": ("layer2",),
    "res4": ("layer3",),
    "res5": ("layer4",),
    "res345": ("layer2", "layer3", "layer4"),
}


def resnet(
    arch: str,
    *,
    block: str | Callable[..., nn.Module] | None = None,
    placement: str | Sequence[str] = "res4",
    weights: str | os.PathLike[str] | None = None,
    num_classes: int = 1000,
    zero_init_residual: bool = False,
    stride_in_1x1: bool = False,
    arch_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ResNet | SmallResNet:
    """A ResNet, ResNeXt or Wide ResNet of torchvision, or `small_resnet`, with a block in it if one is named.

    `block` and its `options`: as for `polynl.insert`.
    `placement`: a key of `PLACEMENTS`, the dotted name of a module to go before, or several of them.
    `weights`: a file with a state dict (`.safetensors`, or what `torch.save` wrote), see `load_weights`.
    `zero_init_residual`: start the last norm of every residual block at zero.
    `stride_in_1x1`: downsample in the first 1×1 convolution of a bottleneck, as the original ResNet did;
    torchvision does it in the 3×3. The shapes are the same, so weights do not tell which they need.
    `arch_options`: further arguments of the network, `{"width": 24}` of `small_resnet` for one.

    >>> model = resnet("resnet18", block="poly_nl", placement="res345", reduction=2)
    >>> model.layer2[1].polynl_before.channels
    128
    """
    if arch not in archs():
        raise ValueError(f"arch must be one of {', '.join(archs())}; got {arch!r}")
    if block is None and options:
        raise TypeError(f"options without a block: {', '.join(options)}")
    build = SmallResNet if arch == "small_resnet" else partial(torchvision.models.get_model, arch)
    model = build(
        num_classes=num_classes,
        zero_init_residual=zero_init_residual,
        **({} if arch_options is None else arch_options),
    )
    if stride_in_1x1:
        _move_strides(model, arch)
    if block is not None:
        for name in _targets(model, placement):
            insert(model, block, before=name, channels=_input_channels(model, name), **options)
    if weights is not None:
        load_weights(model, weights)
    return model


def archs() -> list[str]:
    """The names that `resnet` knows."""
    return ["small_resnet", *torchvision.models.list_models(torchvision.models, include=TORCHVISION_ARCHS)]


resnet18 = partial(resnet, "resnet18")
resnet34 = partial(resnet, "resnet34")
resnet50 = partial(resnet, "resnet50")
resnet101 = partial(resnet, "resnet101")


def _targets(model: nn.Module, placement: str | Sequence[str]) -> list[str]:
    names = [placement] if isinstance(placement, str) else placement
    modules = dict(model.named_modules())
    targets = []
    for name in names:
        if name in PLACEMENTS:
            targets += [f"{stage}.{len(_stage(model, name, stage)) - 1}" for stage in PLACEMENTS[name]]
        elif name in modules:
            targets.append(name)
        else:
            choices = ", ".join(PLACEMENTS)
            raise ValueError(f"placement must be one of {choices} or the name of a module, got {name!r}")
    return targets


def _input_channels(model: nn.Module, name: str) -> int | None:
    module = model.get_submodule(name)
    return module.conv1.in_channels if isinstance(module, BasicBlock | Bottleneck) else None


def _stage(model: nn.Module, placement: str, stage: str) -> nn.Sequential:
    module = getattr(model, stage, None)
    if not isinstance(module, nn.Sequential):
        raise ValueError(f"placement {placement!r} needs a {stage}, and {type(model).__name__} has none")
    return module


def _move_strides(model: nn.Module, arch: str) -> None:
    for stage in ("layer2", "layer3", "layer4"):
        first = next(iter(getattr(model, stage, ())), None)
        if not isinstance(first, Bottleneck):
            raise ValueError(f"stride_in_1x1 needs bottleneck blocks, and {arch} has none in {stage}")
        first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
