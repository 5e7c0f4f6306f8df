"""The paper's places for a block in a ResNet, alone or inside a detector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from polynl.insertion import insert

# The stages of each placement; the block goes right before the last residual block of a stage.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "res3": ("layer2",),
    "res4": ("layer3",),
    "res5": ("layer4",),
    "res345": ("layer2", "layer3", "layer4"),
}


def insert_at(
    model: nn.Module,
    block: str | Callable[..., nn.Module],
    placement: str | Sequence[str],
    *,
    body: str = "",
    example: Any = None,
    **options: Any,
) -> None:
    """Insert a block at a key of `PLACEMENTS`, before a module that is named, or at several of them.

    `body` is the name of the ResNet in the model that has the stages; modules are named as in the model.
    `example`: as for `insert`.
    """
    for name in _targets(model, placement, body):
        channels = _input_channels(model, name)
        shown = example if channels is None else None
        insert(model, block, before=name, channels=channels, example=shown, **options)


def check_options_have_block(block: object, options: Mapping[str, Any]) -> None:
    """Raise a TypeError for options of no block."""
    if block is None and options:
        raise TypeError(f"options without a block: {', '.join(options)}")


def _targets(model: nn.Module, placement: str | Sequence[str], body: str) -> list[str]:
    names = [placement] if isinstance(placement, str) else placement
    modules = dict(model.named_modules())
    prefix = f"{body}." if body else ""
    targets = []
    for name in names:
        if name in PLACEMENTS:
            stages = {stage: _stage(model.get_submodule(body), name, stage) for stage in PLACEMENTS[name]}
            targets += [f"{prefix}{stage}.{len(blocks) - 1}" for stage, blocks in stages.items()]
        elif name in modules:
            targets.append(name)
        else:
            choices = ", ".join(PLACEMENTS)
            raise ValueError(f"placement must be one of {choices} or the name of a module, got {name!r}")
    return targets


def _input_channels(model: nn.Module, name: str) -> int | None:
    module = model.get_submodule(name)
    return module.conv1.in_channels if isinstance(module, BasicBlock | Bottleneck) else None


def _stage(body: nn.Module, placement: str, stage: str) -> nn.Sequential:
    module = getattr(body, stage, None)
    if not isinstance(module, nn.Sequential):
        raise ValueError(f"placement {placement!r} needs a {stage}, and {type(body).__name__} has none")
    return module
