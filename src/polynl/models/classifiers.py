"""ResNets of torchvision with blocks at the paper's places."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from polynl.models.insert import insert, inserted

ARCHS = ("resnet*", "resnext*", "wide_resnet*")
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
    **options: Any,
) -> ResNet:
    """A torchvision ResNet, ResNeXt or Wide ResNet by name, with a block in it if one is named.

    `block` and its `options`: as for `polynl.insert`.
    `placement`: a key of `PLACEMENTS`, the dotted name of a module to go before, or several of them.
    `weights`: a file with a state dict (`.safetensors`, or what `torch.save` wrote), see `load_weights`.
    `zero_init_residual`: start the last norm of every residual block at zero.
    `stride_in_1x1`: downsample in the first 1×1 convolution of a bottleneck, as the original ResNet did;
    torchvision does it in the 3×3. The shapes are the same, so weights do not tell which they need.

    >>> model = resnet("resnet18", block="poly_nl", placement="res345", reduction=2)
    >>> model.layer2[1].polynl_before.channels
    128
    """
    archs = torchvision.models.list_models(torchvision.models, include=ARCHS)
    if arch not in archs:
        raise ValueError(f"arch must be one of {', '.join(archs)}; got {arch!r}")
    if block is None and options:
        raise TypeError(f"options without a block: {', '.join(options)}")
    model = torchvision.models.get_model(arch, num_classes=num_classes, zero_init_residual=zero_init_residual)
    if stride_in_1x1:
        _move_strides(model, arch)
    if block is not None:
        for name in _targets(model, placement):
            insert(model, block, before=name, channels=_input_channels(model, name), **options)
    if weights is not None:
        load_weights(model, weights)
    return model


resnet18 = partial(resnet, "resnet18")
resnet34 = partial(resnet, "resnet34")
resnet50 = partial(resnet, "resnet50")
resnet101 = partial(resnet, "resnet101")


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a state dict from a file that has all of the model's keys; an inserted block may be missing whole.

    Values are converted to the model's dtype. If something does not fit, nothing is loaded.
    """
    own, state = model.state_dict(), _read(path)
    absent = tuple(f"{name}." for name in inserted(model) if not any(k.startswith(f"{name}.") for k in state))
    # Files older than PyTorch 0.4.1 have no num_batches_tracked, and load_state_dict takes them.
    optional = (key for key in own if key.startswith(absent) or key.endswith(".num_batches_tracked"))
    problems = {
        "missing": sorted(own.keys() - state.keys() - set(optional)),
        "unexpected": sorted(state.keys() - own.keys()),
        "of another shape": [
            f"{key} {tuple(state[key].shape)}, not {tuple(own[key].shape)}"
            for key in sorted(own.keys() & state.keys())
            if own[key].shape != state[key].shape
        ],
    }
    if any(problems.values()):
        lines = [f"  {kind}: {_shortened(keys)}" for kind, keys in problems.items() if keys]
        raise ValueError("\n".join([f"{os.fspath(path)!r} does not fit the {type(model).__name__}:", *lines]))
    model.load_state_dict(state, strict=False)


def _read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    if os.fspath(path).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        got = f"a dict of {_shortened(list(state))}" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"{os.fspath(path)!r} must hold a state dict, tensors by name; got {got}")
    return dict(state)


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _targets(model: ResNet, placement: str | Sequence[str]) -> list[str]:
    names = [placement] if isinstance(placement, str) else placement
    modules = dict(model.named_modules())
    targets = []
    for name in names:
        if name in PLACEMENTS:
            targets += [f"{stage}.{len(model.get_submodule(stage)) - 1}" for stage in PLACEMENTS[name]]
        elif name in modules:
            targets.append(name)
        else:
            choices = ", ".join(PLACEMENTS)
            raise ValueError(f"placement must be one of {choices} or the name of a module, got {name!r}")
    return targets


def _input_channels(model: ResNet, name: str) -> int | None:
    module = model.get_submodule(name)
    return module.conv1.in_channels if isinstance(module, BasicBlock | Bottleneck) else None


def _move_strides(model: ResNet, arch: str) -> None:
    for stage in (model.layer2, model.layer3, model.layer4):
        first = stage[0]
        if not isinstance(first, Bottleneck):
            raise ValueError(f"stride_in_1x1 needs bottleneck blocks, and {arch} has none")
        first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
