"""The stages of a network, by the names that libraries give them, and training only the last of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

# Where networks other than ResNets keep their stages: ConvNeXt, Swin, ViT and EfficientNet, torchvision.
CONTAINERS = ("stages", "layers", "blocks", "features")


def stages_of(network: nn.Module) -> list[str]:
    """The names of its stages: layer1, layer2, …, or else stages.0, …; layers, blocks, features alike."""
    children = dict(network.named_children())
    if numbered := [name for name in children if re.fullmatch(r"layer\d+", name)]:
        return numbered
    container = next((name for name in CONTAINERS if name in children), None)
    if container is None:
        return []
    stages = children[container].named_children()
    return [f"{container}.{key}" for key, stage in stages if next(stage.parameters(), None) is not None]


def freeze_stages(network: nn.Module, trainable: int | None, heads: Sequence[str] = ()) -> None:
    """Train only so many of a network's parts, counted from the end: its stem, then its stages.

    The layers named in `heads`, and what comes after the last stage, are always trained.
    """
    if trainable is None:
        return
    stages = stages_of(network)
    parts = ["stem", *stages]
    if trainable > 0 and not stages:
        names = ", ".join(f"{name}.0" for name in CONTAINERS)
        raise ValueError(
            f"trainable_stages={trainable!r}: {type(network).__name__} has no stages called layer1, {names} "
            "or so on; leave it out, or set 0 to train the classifier alone"
        )
    if trainable > len(parts):
        raise ValueError(f"trainable_stages={trainable!r}: expected a number from 0 to {len(parts)}")
    learning = {"end", *parts[len(parts) - trainable :]}
    part = "stem"
    for name, parameter in network.named_parameters():
        stage = next((stage for stage in stages if name.startswith(f"{stage}.")), None)
        if stage is not None:
            part = stage
        elif stages and part == stages[-1]:
            part = "end"
        parameter.requires_grad_(part in learning or name.startswith(tuple(f"{head}." for head in heads)))
