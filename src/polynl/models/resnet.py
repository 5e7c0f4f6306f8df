"""ResNets, torchvision's and a small one, with a block at the paper's placements or before any module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torchvision
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from polynl.blocks.options import positive
from polynl.blocks.registry import BLOCKS, NO_BLOCK, check_options
from polynl.config import MOST_OF_A_BLOCK, Config, check_arguments, configured, errors_at
from polynl.errors import SettingsError, near_matches
from polynl.insertion import insert, inserted
from polynl.models.weights import load_weights

TORCHVISION_ARCHS = ("resnet*", "resnext*", "wide_resnet*")
# Arguments of a ResNet that are keys of their own, or that a config cannot express.
NO_ARCH_OPTIONS = ("block", "layers", "num_classes", "zero_init_residual", "norm_layer")

# The stages of each placement; the block goes right before the last residual block of a stage.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "res3": ("layer2",),
    "res4": ("layer3",),
    "res5": ("layer4",),
    "res345": ("layer2", "layer3", "layer4"),
}


class ResNetConfig(Config):
    """A ResNet with a block in it: what classifiers and the backbones of detectors share."""

    arch: str = "resnet50"
    """A ResNet, ResNeXt or Wide ResNet of torchvision, or small_resnet."""
    arch_options: dict[str, Any] = Field({})
    """Further arguments of the network; small_resnet has depth, width and dropout."""
    block: str | None = None
    """The block to insert, or none."""
    options: dict[str, Any] = Field({})
    """Options of the block."""
    placement: str | Annotated[list[str], Field(min_length=1)] = "res4"
    """Where the block goes: res3, res4, res5, res345, or names of modules to put it before."""
    weights: Path | None = None
    """File of weights to start from: safetensors or a state dict."""
    weights_without: list[str] = Field([])
    """Modules not loaded from the file, such as [fc] if the classes differ."""
    stride_in_1x1: bool = False
    """Downsample in the first 1×1 convolution of a bottleneck, as in the original ResNet, not in the 3×3."""

    @field_validator("arch")
    @classmethod
    def _known_arch(cls, arch: str) -> str:
        if arch not in archs():
            raise ValueError(f"no network is called {arch!r}.{near_matches(arch, archs())}")
        return arch

    @field_validator("arch_options")
    @classmethod
    def _known_arch_options(cls, options: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
        if "arch" in others.data:
            arch = others.data["arch"]
            network = SmallResNet if arch == "small_resnet" else ResNet
            check_arguments(options, network, arch, hidden=NO_ARCH_OPTIONS)
        return options

    @field_validator("block")
    @classmethod
    def _known_block(cls, block: str | None) -> str | None:
        if block is None or block == NO_BLOCK:
            return None
        if block not in BLOCKS:
            hint = near_matches(block, BLOCKS)
            choices = ", ".join((NO_BLOCK, *BLOCKS))
            raise ValueError(f"no block is called {block!r}.{hint} The blocks are {choices}.")
        return block

    @field_validator("options")
    @classmethod
    def _known_options(cls, options: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
        if "block" in others.data and options:
            if others.data["block"] is None:
                raise ValueError(f"options without a block: {', '.join(options)}")
            try:
                check_options(others.data["block"], options)
            except TypeError as error:
                raise ValueError(str(error)) from None
            for name, value in options.items():
                if name in ("device", "dtype"):
                    raise ValueError(f"polynl sets {name} of the block itself; leave it out")
                numbers = value if isinstance(value, list | tuple) else [value]
                if any(isinstance(number, int) and number > MOST_OF_A_BLOCK for number in numbers):
                    raise ValueError(f"{name}={value!r}: expected at most {MOST_OF_A_BLOCK}")
        return options

    def check_files(self) -> None:
        """Raise a SettingsError if a file of weights does not exist."""
        for key in type(self).model_fields:
            path = getattr(self, key)
            if key.endswith("weights") and path is not None and not path.is_file():
                option = f"--model.{key.replace('_', '-')}"
                hint = f" Give yours: {option} FILE, or null for none"
                raise SettingsError(f"model.{key}: no such file: {path}.", hint=hint)

    def network(self, num_classes: int, **arguments: Any) -> ResNet | SmallResNet:
        """The ResNet alone, without block and weights."""
        small = self.arch == "small_resnet"
        build = SmallResNet if small else partial(torchvision.models.get_model, self.arch)
        model = build(num_classes=num_classes, **arguments, **self.arch_options)
        if self.stride_in_1x1:
            move_strides(model, self.arch)
        return model

    def insert_into(self, model: nn.Module, *, body: str = "", example: Any = None) -> None:
        """Insert the block, if there is one; see `insert_at`."""
        if self.block is not None:
            insert_at(model, self.block, self.placement, body=body, example=example, **self.options)

    def load_into(self, model: nn.Module) -> None:
        """Load the weights, if there are any."""
        if self.weights is not None:
            for name in self.weights_without:
                if not any(key.startswith(f"{name}.") for key in model.state_dict()):
                    network = type(model).__name__
                    raise ValueError(f"weights_without: the {network} has no weights below {name!r}")
            load_weights(model, self.weights, self.weights_without)


class ClassifierConfig(ResNetConfig):
    """The network; its classifier is always trained, and so is a block, wherever it is."""

    trainable_stages: int | None = Field(None, ge=0)
    """Number of stages trained, counted from the end, the stem being the first (default: all)."""
    zero_init_residual: bool = False
    """Start the last norm of every residual block at zero."""
    norm: Literal["batch", "sync", "frozen"] = "batch"
    """Batch statistics of each process, of all processes (GPU only), or frozen norms."""

    def build(self, num_classes: int) -> nn.Module:
        """The network with its block, weights and norms."""
        model = self._without_weights(num_classes)
        self.load_into(model)
        return self._with_norms(model)

    def check(self, num_classes: int) -> None:
        """Raise a SettingsError if the network cannot be built, in no time and without memory."""
        self.check_files()
        with torch.device("meta"), errors_at("model"):
            model = self._without_weights(num_classes)
        with errors_at("model.weights"):
            self.load_into(model)
        self._with_norms(model)

    def _without_weights(self, num_classes: int) -> nn.Module:
        model = self.network(num_classes, zero_init_residual=self.zero_init_residual)
        freeze_stages(model, self.trainable_stages)
        self.insert_into(model)
        return model

    def _with_norms(self, model: nn.Module) -> nn.Module:
        blocks = set(inserted(model))
        # Norms of stages that are not trained do not collect batch statistics either.
        freeze_norms(model, only_untrained=self.norm != "frozen")
        if self.norm == "sync":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if lost := blocks - set(inserted(model)):
            raise SettingsError(
                f"model.norm: {self.norm} replaces the norm that {', '.join(lost)} stands before; "
                "choose another model.placement."
            )
        return model


def resnet(arch: str, *, num_classes: int = 1000, **keys: Any) -> nn.Module:
    """A ResNet with a block in it; `keys` are those of `ClassifierConfig`.

    >>> model = resnet("resnet18", block="poly_nl", placement="res345", options={"reduction": 2})
    >>> model.layer2[1].polynl_before.channels
    128
    """
    return configured(ClassifierConfig, arch=arch, **keys).build(num_classes)


resnet18 = partial(resnet, "resnet18")
resnet34 = partial(resnet, "resnet34")
resnet50 = partial(resnet, "resnet50")
resnet101 = partial(resnet, "resnet101")


def archs() -> list[str]:
    """The names that `resnet` knows."""
    return ["small_resnet", *torchvision.models.list_models(torchvision.models, include=TORCHVISION_ARCHS)]


class SmallResNet(nn.Module):
    """A ResNet for small images: a 3×3 stem, three stages of `depth` bottlenecks, a classifier.

    The stages have 4, 6 and 8 times `width` channels. Modules are named as in torchvision's ResNets, so that
    `PLACEMENTS` mean the same: `res4` is before the last residual block of `layer3`. The stem and the second
    stage halve the map; with `depth` 1 an output position sees 19 × 19 pixels.
    """

    def __init__(
        self,
        *,
        depth: int = 1,
        width: int = 16,
        dropout: float = 0.0,
        num_classes: int = 10,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        if positive("depth", depth) > 256:
            raise ValueError(f"depth={depth!r}: expected at most 256")
        if positive("width", width) % 2 or width > 1024:
            raise ValueError(
                f"width={width!r}: expected an even number up to 1024, since a stage is 3/2 as wide"
            )
        if isinstance(dropout, str) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout!r}: expected a number from 0 to 1")
        self.conv1 = nn.Conv2d(3, 2 * width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _small_stage(2 * width, width, depth, stride=1)
        self.layer2 = _small_stage(4 * width, width * 3 // 2, depth, stride=2)
        self.layer3 = _small_stage(6 * width, 2 * width, depth, stride=1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(8 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init_residual:
                nn.init.zeros_(module.bn3.weight)

    def features(self, x: Tensor) -> Tensor:
        """The last map, before the mean over positions."""
        x = self.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (b, num_classes)."""
        return self.fc(self.dropout(self.avgpool(self.features(x)).flatten(1)))


def _small_stage(inputs: int, planes: int, depth: int, *, stride: int) -> nn.Sequential:
    outputs = Bottleneck.expansion * planes
    shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
    )
    first = Bottleneck(inputs, planes, stride, shortcut)
    return nn.Sequential(first, *(Bottleneck(outputs, planes) for _ in range(depth - 1)))


def move_strides(model: nn.Module, arch: str) -> None:
    """Downsample in the first 1×1 convolution of bottlenecks; a ValueError if there are none.

    The shapes stay the same, so weights do not tell which variant they need.
    """
    for stage in ("layer2", "layer3", "layer4"):
        first = next(iter(getattr(model, stage, ())), None)
        if not isinstance(first, Bottleneck):
            raise ValueError(f"stride_in_1x1 needs bottleneck blocks, and {arch} has none in {stage}")
        first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride


def stages_of(network: nn.Module) -> list[str]:
    """The names of a ResNet's stages."""
    return [name for name, _ in network.named_children() if name.startswith("layer")]


def freeze_stages(network: nn.Module, trainable: int | None) -> None:
    """Train only so many of a ResNet's parts, counted from the end: its stem, then its stages."""
    stages = stages_of(network)
    parts = ["stem", *stages]
    if trainable is None:
        return
    if trainable > len(parts):
        raise ValueError(f"trainable_stages={trainable!r}: expected a number from 0 to {len(parts)}")
    learning = {"fc", *parts[len(parts) - trainable :]}
    for name, parameter in network.named_parameters():
        part = name.partition(".")[0]
        parameter.requires_grad_((part if part in (*stages, "fc") else "stem") in learning)


def freeze_norms(model: nn.Module, *, eps: float | None = None, only_untrained: bool = False) -> None:
    """Replace every BatchNorm2d by a frozen one with the same values (default `eps`: its own).

    With `only_untrained`, norms whose weights are trained stay.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d) and not (only_untrained and child.weight.requires_grad):
                frozen = FrozenBatchNorm2d(child.num_features, eps=child.eps if eps is None else eps)
                frozen.to(child.weight)
                frozen.load_state_dict({key: child.state_dict()[key] for key in frozen.state_dict()})
                setattr(parent, name, frozen)


# Placements


def insert_at(
    model: nn.Module,
    block: str | Callable[..., nn.Module],
    placement: str | Sequence[str],
    *,
    body: str = "",
    example: Any = None,
    **options: Any,
) -> None:
    """Insert a block at a key of `PLACEMENTS`, before a named module, or at several of them.

    `body` is the name of the ResNet in the model; modules are named as in the model. `example`: as for
    `polynl.insert`.
    """
    for name in _targets(model, placement, body):
        module = model.get_submodule(name)
        if isinstance(module, BasicBlock | Bottleneck):
            insert(model, block, before=name, channels=module.conv1.in_channels, **options)
        else:
            insert(model, block, before=name, example=example, **options)


def _targets(model: nn.Module, placement: str | Sequence[str], body: str) -> list[str]:
    modules = dict(model.named_modules())
    network = modules[body]
    targets = []
    for name in [placement] if isinstance(placement, str) else placement:
        if name not in PLACEMENTS and name not in modules:
            choices = ", ".join(PLACEMENTS)
            raise ValueError(f"placement must be one of {choices} or the name of a module, got {name!r}")
        for stage in PLACEMENTS.get(name, ()):
            blocks = getattr(network, stage, None)
            if not isinstance(blocks, nn.Sequential):
                raise ValueError(f"placement {name!r} needs a {stage}, and {type(network).__name__} has none")
            targets.append(f"{body}.{stage}.{len(blocks) - 1}".removeprefix("."))
        if name not in PLACEMENTS:
            targets.append(name)
    return targets
