"""ResNets and networks of timm with a feature pyramid: the backbones of detectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import Bottleneck
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, FeaturePyramidNetwork, LastLevelMaxPool

from polynl.blocks.registry import BLOCKS
from polynl.config import Side, Width, check_arguments
from polynl.insertion import ignore_padding
from polynl.models.libraries import without_memory
from polynl.models.norms import freeze_norms, synchronised
from polynl.models.resnet import CLASSIFIER, NetworkConfig, archs
from polynl.models.stages import freeze_stages, stages_of
from polynl.models.timm_maps import TimmPyramid, check_takes, drop_head, maps_by_level
from polynl.models.weights import load_weights

Detector = TypeVar("Detector", bound=nn.Module)
# The ResNet's place in a detector of torchvision.
BODY = "backbone.body"
# The recipe.yaml of every run has them all, and those from before `ignore_padding` do not have that one.
OLDER_KEYS = {
    *("backbone_weights", "trainable_stages", "norm", "norm_eps"),
    *("fpn_channels", "min_size", "max_size", "detector_options"),
}


class DetectorConfig(NetworkConfig):
    """A detector on a network with a feature pyramid; a block is trained wherever it is, with its norms."""

    detector: ClassVar[Callable[..., nn.Module]]
    """Torchvision's detector, whose further arguments are `detector_options`."""
    own: ClassVar[Mapping[str, str | None]]
    """Arguments of the detector that polynl sets itself, by the key they come from, if any."""

    backbone_weights: Path | None = None
    """File of weights for the network alone, such as those of ImageNet; the classifier is not loaded."""
    trainable_stages: int | None = Field(None, ge=0)
    """Number of stages trained, counted from the end, the stem being the first (default: three with weights,
    else all)."""
    norm: Literal["frozen", "batch", "sync"] = "frozen"
    """Norms of the network: frozen, or batch statistics of each process, or of all processes (GPU only)."""
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
    ignore_padding: bool | Literal["everywhere"] = True
    """Keep the padding of batches out of the block's sums (not possible for tesa); everywhere: and out of
    convolutions."""

    @model_validator(mode="before")
    @classmethod
    def _as_trained(cls, keys: Any) -> Any:
        """Do not ignore padding if a run from before this key wrote the recipe."""
        if isinstance(keys, Mapping) and "ignore_padding" not in keys and keys.keys() >= OLDER_KEYS:
            return {**keys, "ignore_padding": False}
        return keys

    @field_validator("arch")
    @classmethod
    def _has_maps(cls, arch: str) -> str:
        if arch not in archs() and not arch.startswith("timm/"):
            raise ValueError(f"detectors are built on ResNets or on timm/NAME; got {arch!r}")
        return arch

    @field_validator("detector_options")
    @classmethod
    def _known_detector_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        own = {**cls.own, "min_size": "min_size", "max_size": "max_size"}
        check_arguments(options, cls.detector, cls.detector.__name__, own=own)
        return options

    def backbone(self, levels: Sequence[int] | None = None) -> BackboneWithFPN | TimmPyramid:
        """A pyramid of maps: one for every resolution of the network from stride 4 on, and one below.

        `levels`: instead of these, maps of stride 2^level each, from fine to coarse without a gap; maps
        coarser than the network's are made by convolutions.
        """
        body = self.network(num_classes=1)
        pretrained = not (self.weights is self.backbone_weights is None) and stages_of(body) != []
        trainable = 3 if self.trainable_stages is None and pretrained else self.trainable_stages
        freeze_stages(body, trainable)
        if self.norm == "frozen":
            freeze_norms(body, eps=self.norm_eps)
        elif self.norm_eps is not None:
            raise ValueError(f"norm_eps={self.norm_eps!r} is for frozen norms, and these are {self.norm!r}")
        else:
            # Norms of stages that are not trained do not collect batch statistics either.
            freeze_norms(body, only_untrained=True)
        seen: dict[int, tuple[Any, int]]
        seen = _last_of_each_level(body) if self.is_resnet else maps_by_level(body, self.arch)
        further: ExtraFPNBlock | None = None
        if levels is not None:
            _check_levels(levels, list(seen), self.arch)
            last = seen[max(seen)][1]
            further = CoarserMaps(last, self.fpn_channels, sum(level > max(seen) for level in levels))
            seen = {level: place for level, place in seen.items() if level in levels}
        places, widths = zip(*seen.values(), strict=True)
        if self.is_resnet:
            names = {stage: str(number) for number, stage in enumerate(places)}
            return BackboneWithFPN(body, names, widths, self.fpn_channels, extra_blocks=further)
        drop_head(body)
        below = LastLevelMaxPool() if further is None else further
        pyramid = TimmPyramid(body, places, FeaturePyramidNetwork(widths, self.fpn_channels, below))
        side = self.min_size if isinstance(self.min_size, int) else self.min_size[-1]
        check_takes(pyramid, side, self.arch)
        return pyramid

    def complete(self, model: Detector) -> Detector:
        """Insert the block, synchronise norms, load weights: those of the network, then the detector's."""
        # A list, as detectors take it, or the modules around the images would seem to get a map.
        self.insert_into(model, body=BODY, example=([torch.zeros(3, 64, 64)],))
        if self.norm == "sync":
            model = synchronised(model)
        if self.backbone_weights is not None:
            body = model.get_submodule(BODY)
            name = f"{'ResNet' if self.is_resnet else self.arch} of the detector"
            try:
                load_weights(body, self.backbone_weights, self._left_out(body), name=name)
            except ValueError as error:
                raise ValueError(f"backbone_weights: {error}") from error
        self.load_into(model)
        if self._can_ignore_padding():
            ignore_padding(model, everywhere=self.ignore_padding == "everywhere")
        return model

    def _can_ignore_padding(self) -> bool:
        if self.ignore_padding is True:
            return self.block is not None and BLOCKS[self.block].block.takes_masks
        return self.ignore_padding == "everywhere"

    def _left_out(self, body: nn.Module) -> list[str]:
        """The modules of the classifier that the detector does not have."""
        if self.is_resnet:
            return [CLASSIFIER]
        whole = without_memory(lambda: self.network(num_classes=1)).state_dict()
        return sorted({key.rpartition(".")[0] for key in whole.keys() - body.state_dict().keys()})


class CoarserMaps(ExtraFPNBlock):  # type: ignore[misc]  # torchvision has no types
    """Maps below those of the network, each half as large as the one before, by 3×3 convolutions."""

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
        """The pyramid's maps and names followed by the coarser ones; `x` are the network's maps."""
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


def _last_of_each_level(body: nn.Module) -> dict[int, tuple[str, int]]:
    """The last stage of every stride 2^level, and its channels, by the level."""
    level, found = sum(name in ("conv1", "maxpool") for name, _ in body.named_children()), {}
    for name in stages_of(body):
        stage = body.get_submodule(name)
        convs = [module for module in stage.modules() if isinstance(module, nn.Conv2d)]
        level += max(conv.stride[0] for conv in convs) > 1
        found[level] = name, _width(stage)
    return found


def _width(stage: nn.Module) -> int:
    last: Any = list(stage.children())[-1]
    return (last.conv3 if isinstance(last, Bottleneck) else last.conv2).out_channels
