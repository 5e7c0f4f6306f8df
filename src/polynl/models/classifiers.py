"""ResNets, torchvision's and a small one, with blocks at the paper's places."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

from polynl.models.placements import check_options_have_block, insert_at
from polynl.models.small_resnet import SmallResNet
from polynl.models.weights import check_left_out, load_weights

TORCHVISION_ARCHS = ("resnet*", "resnext*", "wide_resnet*")


def resnet(
    arch: str,
    *,
    block: str | Callable[..., nn.Module] | None = None,
    placement: str | Sequence[str] = "res4",
    weights: str | os.PathLike[str] | None = None,
    weights_without: Sequence[str] = (),
    num_classes: int = 1000,
    zero_init_residual: bool = False,
    stride_in_1x1: bool = False,
    arch_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ResNet | SmallResNet:
    """A ResNet, ResNeXt or Wide ResNet of torchvision, or `small_resnet`, with a block in it if one is named.

    `block` and its `options`: as for `polynl.insert`.
    `placement`: a key of `PLACEMENTS`, the dotted name of a module to go before, or several of them.
    `weights`: a file with a state dict (`.safetensors`, or what `torch.save` wrote), see `load_weights`;
    modules named in `weights_without`, such as `fc` for other classes, are not loaded.
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
    check_options_have_block(block, options)
    build = SmallResNet if arch == "small_resnet" else partial(torchvision.models.get_model, arch)
    model = build(
        num_classes=num_classes,
        zero_init_residual=zero_init_residual,
        **({} if arch_options is None else arch_options),
    )
    if stride_in_1x1:
        move_strides(model, arch)
    if block is not None:
        insert_at(model, block, placement, **options)
    if weights is not None:
        check_left_out(model, weights_without)
        load_weights(model, weights, weights_without)
    return model


def archs() -> list[str]:
    """The names that `resnet` knows."""
    return ["small_resnet", *torchvision.models.list_models(torchvision.models, include=TORCHVISION_ARCHS)]


resnet18 = partial(resnet, "resnet18")
resnet34 = partial(resnet, "resnet34")
resnet50 = partial(resnet, "resnet50")
resnet101 = partial(resnet, "resnet101")


def move_strides(model: nn.Module, arch: str) -> None:
    """Downsample in the first 1×1 convolution of bottlenecks; a ValueError where there are none."""
    for stage in ("layer2", "layer3", "layer4"):
        first = next(iter(getattr(model, stage, ())), None)
        if not isinstance(first, Bottleneck):
            raise ValueError(f"stride_in_1x1 needs bottleneck blocks, and {arch} has none in {stage}")
        first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
