"""ResNets with a feature pyramid: the backbones of detectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import Bottleneck
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock

from polynl.config import Side, Width, check_arguments
from polynl.models.resnet import ResNetConfig, freeze_norms, freeze_stages, stages_of
from polynl.models.weights import load_weights

Detector = TypeVar("Detector", bound=nn.Module)
# The ResNet's place in a detector of torchvision.
BODY = "backbone.body"


class DetectorConfig(ResNetConfig):
    """A detector on a ResNet with a feature pyramid; a block is trained wherever it is, with its norms."""

    detector: ClassVar[Callable[..., nn.Module]]
    """Torchvision's detector, whose further arguments are `detector_options`."""
    own: ClassVar[Mapping[str, str | None]]
    """Arguments of the detector that polynl sets itself, by the key they come from, if any."""

    backbone_weights: Path | None = None
    """File of weights for the ResNet alone, such as those of ImageNet; the classifier is not loaded."""
    trainable_stages: int | None = Field(None, ge=0)
    """Number of stages trained, counted from the end, the stem being the first (default: three with weights,
    else all)."""
    norm: Literal["frozen", "batch", "sync"] = "frozen"
    """Norms of the ResNet: frozen, or batch statistics of each process, or of all processes (GPU only)."""
    norm_eps: float | None = Field(None, ge=0)
    """Epsilon of frozen norms; 0 for torchvision's COCO_V1 weights."""
    fpn_channels: Width = 256
    """Channels of every map of the pyramid."""
    min_size: Side | Annotated[list[Side], Field(min_length=1)] = 800
    """Images are resized to this shorter side; training draws from several, scoring uses the last."""
    max_size: Side = 1333
    """Maximum of the longer side."""
    detector_options: dict[str, Any] = Field({})
    """Further arguments of torchvision's detector, such as nms_thresh."""

    @field_validator("detector_options")
    @classmethod
    def _known_detector_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        own = {**cls.own, "min_size": "min_size", "max_size": "max_size"}
        check_arguments(options, cls.detector, cls.detector.__name__, own=own)
        return options

    def backbone(self, levels: Sequence[int] | None = None) -> BackboneWithFPN:
        """A pyramid of maps: one for every resolution of the ResNet, and one below.

        `levels`: instead of these, maps of stride 2^level each, from fine to coarse without a gap; maps
        coarser than the ResNet's are made by convolutions.
        """
        body = self.network(num_classes=1)
        stages = stages_of(body)
        pretrained = not (self.weights is self.backbone_weights is None)
        freeze_stages(body, 3 if self.trainable_stages is None and pretrained else self.trainable_stages)
        if self.norm == "frozen":
            freeze_norms(body, eps=self.norm_eps)
        elif self.norm_eps is not None:
            raise ValueError(f"norm_eps={self.norm_eps!r} is for frozen norms, and these are {self.norm!r}")
        else:
            # Norms of stages that are not trained do not collect batch statistics either.
            freeze_norms(body, only_untrained=True)
        seen = _last_of_each_level(body, stages)
        further: ExtraFPNBlock | None = None
        if levels is not None:
            _check_levels(levels, list(seen), self.arch)
            last = _width(body.get_submodule(seen[max(seen)]))
            further = CoarserMaps(last, self.fpn_channels, sum(level > max(seen) for level in levels))
            seen = {level: stage for level, stage in seen.items() if level in levels}
        return BackboneWithFPN(
            body,
            return_layers={stage: str(number) for number, stage in enumerate(seen.values())},
            in_channels_list=[_width(body.get_submodule(stage)) for stage in seen.values()],
            out_channels=self.fpn_channels,
            extra_blocks=further,
        )

    def complete(self, model: Detector) -> Detector:
        """Insert the block, synchronise norms, load the weights of the ResNet, then those of the detector."""
        # A list, as detectors take it, or the modules around the images would seem to get a map.
        self.insert_into(model, body=BODY, example=([torch.zeros(3, 64, 64)],))
        if self.norm == "sync":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.backbone_weights is not None:
            body = model.get_submodule(BODY)
            try:
                load_weights(body, self.backbone_weights, without=("fc",), name="ResNet of the detector")
            except ValueError as error:
                raise ValueError(f"backbone_weights: {error}") from error
        self.load_into(model)
        return model


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
        """The pyramid's maps and names followed by the coarser ones; `x` are the ResNet's maps."""
        maps, names, last = list(results), list(names), x[-1]
        for number, conv in enumerate(self.convs):
            last = conv(last.relu() if number else last)
            maps.append(last)
            names.append(f"further{number}")
        return maps, names


def _check_levels(levels: Sequence[int], there: list[int], arch: str) -> None:
    if not levels or list(levels) != list(range(levels[0], levels[0] + len(levels))):
        raise ValueError(f"levels={list(levels)}: expected consecutive numbers, such as 2, 3, 4")
    if not min(there) <= levels[0] <= max(there) <= levels[-1]:
        raise ValueError(
            f"levels={list(levels)}: {arch} has {', '.join(map(str, there))}; start with one of them, and "
            f"end with {max(there)} or higher"
        )


def _last_of_each_level(body: nn.Module, stages: list[str]) -> dict[int, str]:
    """The last stage of every stride 2^level, by the level."""
    level, found = sum(name in ("conv1", "maxpool") for name, _ in body.named_children()), {}
    for stage in stages:
        convs = [module for module in body.get_submodule(stage).modules() if isinstance(module, nn.Conv2d)]
        level += max(conv.stride[0] for conv in convs) > 1
        found[level] = stage
    return found


def _width(stage: nn.Module) -> int:
    last: Any = list(stage.children())[-1]
    return (last.conv3 if isinstance(last, Bottleneck) else last.conv2).out_channels
