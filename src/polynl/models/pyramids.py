"""ResNets with a feature pyramid on top: what detectors see an image through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import Bottleneck

from polynl.models.classifiers import resnet
from polynl.models.norms import freeze_norms

Norm = Literal["frozen", "batch", "sync"]
# The ResNet's place in a detector of torchvision.
BODY = "backbone.body"


def resnet_fpn(
    arch: str,
    *,
    channels: int = 256,
    trainable_stages: int | None = None,
    norm: Norm = "frozen",
    norm_eps: float | None = None,
    stride_in_1x1: bool = False,
    arch_options: Mapping[str, Any] | None = None,
) -> BackboneWithFPN:
    """A pyramid of maps with `channels` each: one for every resolution of the ResNet, and one below.

    `arch`, `stride_in_1x1`, `arch_options`: as for `polynl.models.classifiers.resnet`.
    `trainable_stages`: so many from the end are trained, the stem being the first of them; None: all.
    `norm`: batch norms whose values stay as they are, or with the statistics of a process or of all.
    `norm_eps`: of frozen norms; 0 for torchvision's first COCO weights, which were trained with it.
    """
    body = resnet(arch, num_classes=1, stride_in_1x1=stride_in_1x1, arch_options=arch_options)
    stages = [name for name, _ in body.named_children() if name.startswith("layer")]
    _freeze(body, stages, trainable_stages)
    if norm == "frozen":
        freeze_norms(body, eps=norm_eps)
    elif norm_eps is not None:
        raise ValueError(f"norm_eps={norm_eps!r} is of frozen norms, and these are {norm!r}")
    elif norm == "sync":
        body = nn.SyncBatchNorm.convert_sync_batchnorm(body)
    seen = _last_of_each_resolution(body, stages)
    return BackboneWithFPN(
        body,
        return_layers={stage: str(number) for number, stage in enumerate(seen)},
        in_channels_list=[_width(body.get_submodule(stage)) for stage in seen],
        out_channels=channels,
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


def _last_of_each_resolution(body: nn.Module, stages: list[str]) -> list[str]:
    halving = [_stride(body.get_submodule(stage)) > 1 for stage in stages]
    return [stage for stage, ends in zip(stages, [*halving[1:], True], strict=True) if ends]


def _stride(stage: nn.Module) -> int:
    return max(conv.stride[0] for conv in stage.modules() if isinstance(conv, nn.Conv2d))


def _width(stage: nn.Module) -> int:
    last: Any = list(stage.children())[-1]
    return (last.conv3 if isinstance(last, Bottleneck) else last.conv2).out_channels
