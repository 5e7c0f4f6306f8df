"""ResNets with a feature pyramid on top: what detectors see an image through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import Bottleneck
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock

from polynl.models.classifiers import resnet
from polynl.models.norms import freeze_norms

Norm = Literal["frozen", "batch", "sync"]
# The ResNet's place in a detector of torchvision.
BODY = "backbone.body"


def resnet_fpn(
    arch: str,
    *,
    channels: int = 256,
    levels: Sequence[int] | None = None,
    trainable_stages: int | None = None,
    norm: Norm = "frozen",
    norm_eps: float | None = None,
    stride_in_1x1: bool = False,
    arch_options: Mapping[str, Any] | None = None,
) -> BackboneWithFPN:
    """A pyramid of maps with `channels` each: one for every resolution of the ResNet, and one below.

    `levels`: instead of these, maps of stride 2^level each, from fine to coarse without a gap; those that are
    coarser than the ResNet's are made by convolutions.
    `arch`, `stride_in_1x1`, `arch_options`: as for `polynl.models.classifiers.resnet`.
    `trainable_stages`: so many from the end are trained, the stem being the first of them; None: all.
    `norm`: batch norms whose values stay as they are, or with the statistics of a process; those of all
    processes are for whoever has the whole model.
    `norm_eps`: of frozen norms; 0 for torchvision's first COCO weights, which were trained with it.
    """
    body = resnet(arch, num_classes=1, stride_in_1x1=stride_in_1x1, arch_options=arch_options)
    stages = [name for name, _ in body.named_children() if name.startswith("layer")]
    _freeze(body, stages, trainable_stages)
    if norm == "frozen":
        freeze_norms(body, eps=norm_eps)
    elif norm_eps is not None:
        raise ValueError(f"norm_eps={norm_eps!r} is of frozen norms, and these are {norm!r}")
    else:
        _freeze_norms_of_frozen(body)
    seen = _last_of_each_level(body, stages)
    further: ExtraFPNBlock | None = None
    if levels is not None:
        _check_levels(levels, list(seen), arch)
        last = _width(body.get_submodule(seen[max(seen)]))
        further = CoarserMaps(last, channels, sum(level > max(seen) for level in levels))
        seen = {level: stage for level, stage in seen.items() if level in levels}
    return BackboneWithFPN(
        body,
        return_layers={stage: str(number) for number, stage in enumerate(seen.values())},
        in_channels_list=[_width(body.get_submodule(stage)) for stage in seen.values()],
        out_channels=channels,
        extra_blocks=further,
    )


class CoarserMaps(ExtraFPNBlock):  # type: ignore[misc]  # torchvision has no types
    """Maps below those of the ResNet, each half as large as the one before, by 3×3 convolutions."""

    def __init__(self, in_channels: int, channels: int, count: int) -> None:
        super().__init__()
        convs = [
            nn.Conv2d(channels if number else in_channels, channels, 3, stride=2, padding=1)
            for number in range(count)
        ]
        self.convs = nn.ModuleList(convs)
        for conv in convs:
            nn.init.kaiming_uniform_(conv.weight, a=1)
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]  # it has one

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        """The pyramid's maps and names with the further ones behind them; `x` are the ResNet's maps."""
        maps, names, last = list(results), list(names), x[-1]
        for number, conv in enumerate(self.convs):
            last = conv(last.relu() if number else last)
            maps.append(last)
            names.append(f"further{number}")
        return maps, names


def _check_levels(levels: Sequence[int], there: list[int], arch: str) -> None:
    if not levels or list(levels) != list(range(levels[0], levels[0] + len(levels))):
        raise ValueError(f"levels={list(levels)}: expected numbers that follow each other, such as 2, 3, 4")
    if not min(there) <= levels[0] <= max(there) <= levels[-1]:
        raise ValueError(
            f"levels={list(levels)}: {arch} has {', '.join(map(str, there))}; begin with one of them, and "
            f"end with {max(there)} or a higher one"
        )


def _freeze(body: nn.Module, stages: list[str], trainable: int | None) -> None:
    parts = ["stem", *stages]
    if trainable is None:
        trainable = len(parts)
    if not 0 <= trainable <= len(parts):
        raise ValueError(f"trainable_stages={trainable!r}: expected a number from 0 to {len(parts)}")
    learning = set(parts[len(parts) - trainable :])
    for name, parameter in body.named_parameters():
        part = name.partition(".")[0]
        parameter.requires_grad_((part if part in stages else "stem") in learning)


def _freeze_norms_of_frozen(body: nn.Module) -> None:
    """What is not trained does not take part in batch statistics either."""
    for name, child in list(body.named_children()):
        parameters = list(child.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            holder = nn.ModuleDict({name: child})
            freeze_norms(holder)
            setattr(body, name, holder[name])


def _last_of_each_level(body: nn.Module, stages: list[str]) -> dict[int, str]:
    """The last stage of every stride 2^level, by the level."""
    stem = [module for name, module in body.named_children() if name in ("conv1", "maxpool")]
    level, found = len(stem), {}
    for stage in stages:
        level += _stride(body.get_submodule(stage)) > 1
        found[level] = stage
    return found


def _stride(stage: nn.Module) -> int:
    return max(conv.stride[0] for conv in stage.modules() if isinstance(conv, nn.Conv2d))


def _width(stage: nn.Module) -> int:
    last: Any = list(stage.children())[-1]
    return (last.conv3 if isinstance(last, Bottleneck) else last.conv2).out_channels
