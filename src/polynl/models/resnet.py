"""Networks with a block at the paper's placements or before any module; ResNets, and a small one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torchvision
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from polynl.blocks.registry import BLOCKS, NO_BLOCK, check_options
from polynl.config import MOST_OF_A_BLOCK, Config, check_arguments, configured, errors_at
from polynl.errors import SettingsError, near_matches, shown
from polynl.insertion import insert, inserted
from polynl.models.heads import check_logits, heads_of
from polynl.models.libraries import Builder, names_a_network, network_builder, without_memory
from polynl.models.norms import freeze_norms, synchronised
from polynl.models.small_resnet import SmallResNet
from polynl.models.stages import freeze_stages, stages_of
from polynl.models.weights import MisfitError, load_weights, read_state

# The name of a ResNet's classifier.
CLASSIFIER = "fc"
TORCHVISION_ARCHS = ("resnet*", "resnext*", "wide_resnet*")
# Arguments of a ResNet that are keys of their own, or that a config cannot express.
NO_ARCH_OPTIONS = ("block", "layers", "num_classes", "zero_init_residual", "norm_layer")
# Arguments of other networks that are keys of their own.
SET_BY_POLYNL = {
    "num_classes": "leave it out",
    "pretrained": "load a file with weights",
    "weights": "load a file with weights",
    "features_only": "leave it out",
}

# The stages of each placement; the block goes right before the last residual block of a stage.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "res3": ("layer2",),
    "res4": ("layer3",),
    "res5": ("layer4",),
    "res345": ("layer2", "layer3", "layer4"),
}


def _module_name(value: object) -> object:
    """Layers of an `nn.Sequential` are called 0, 1, …, which YAML reads as numbers."""
    if isinstance(value, float):
        raise ValueError(f"YAML reads {value} as a number; quote the name of the module: \"'{value}'\"")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


ModuleName = Annotated[str, BeforeValidator(_module_name)]


class NetworkConfig(Config):
    """A network with a block in it: what classifiers and the backbones of detectors share."""

    arch: str = "resnet50"
    """A ResNet, ResNeXt or Wide ResNet of torchvision; small_resnet; torchvision/NAME; timm/NAME; or your own
    package.module:function, which is called with num_classes and arch_options."""
    arch_options: dict[str, Any] = Field({})
    """Further arguments of the network; small_resnet has depth, width and dropout."""
    block: str | None = None
    """The block to insert, or none."""
    options: dict[str, Any] = Field({})
    """Options of the block."""
    placement: ModuleName | Annotated[list[ModuleName], Field(min_length=1)] = "res4"
    """Where the block goes: res3, res4, res5, res345, or names of modules to put it before."""
    weights: Path | None = None
    """File of weights to start from: safetensors or a state dict."""
    weights_without: list[ModuleName] = Field([])
    """Modules not loaded from the file. A classifier of other classes is never loaded."""
    stride_in_1x1: bool = False
    """Downsample in the first 1×1 convolution of a bottleneck, as in the original ResNet, not in the 3×3."""

    @field_validator("arch")
    @classmethod
    def _known_arch(cls, arch: str) -> str:
        known = archs()
        short = arch.removeprefix("torchvision/")
        if arch in known or short in known[1:]:
            return short
        if not names_a_network(arch):
            theirs = torchvision.models.list_models()
            hint = f" Did you mean torchvision/{arch}?" if arch in theirs else near_matches(arch, known)
            raise ValueError(
                f"no network is called {arch!r}.{hint} Other networks are torchvision/NAME, timm/NAME and "
                "package.module:function."
            )
        return arch

    @field_validator("arch_options")
    @classmethod
    def _known_arch_options(cls, options: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
        if "arch" in others.data:
            arch = others.data["arch"]
            if arch in archs():
                network = SmallResNet if arch == "small_resnet" else ResNet
                check_arguments(options, network, arch, hidden=NO_ARCH_OPTIONS)
            elif own := sorted(options.keys() & SET_BY_POLYNL):
                raise ValueError(f"polynl sets {own[0]} of {arch} itself; {SET_BY_POLYNL[own[0]]}")
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

    @property
    def is_resnet(self) -> bool:
        """Whether it is one of `archs`, which take images of any size."""
        return self.arch in archs()

    def network(self, num_classes: int, **arguments: Any) -> nn.Module:
        """The network alone, without block and weights."""
        model = self._builder()(num_classes=num_classes, **arguments)
        if not isinstance(model, nn.Module):
            raise SettingsError(f"model.arch: {self.arch} returns {shown(model)}; expected an nn.Module.")
        if self.stride_in_1x1:
            move_strides(model, self.arch)
        return model

    def _builder(self) -> Builder:
        if self.arch == "small_resnet":
            return partial(SmallResNet, **self.arch_options)
        if self.is_resnet:
            return partial(torchvision.models.get_model, self.arch, **self.arch_options)
        with errors_at("model.arch"):
            return partial(self._built, network_builder(self.arch))

    def _built(self, build: Builder, **arguments: Any) -> nn.Module:
        """A network of a library; whatever it raises is due to its options, if it has any."""
        try:
            return build(**arguments, **self.arch_options)
        except Exception as error:
            if not self.arch_options or "meta" in str(error).lower():
                raise
            raise SettingsError(
                f"model.arch_options: {self.arch} cannot be built with {shown(self.arch_options)}: {error}.",
                hint=" For none: --model.arch-options {}",
            ) from error

    def heads(self) -> list[str]:
        """The names of the layers that classify."""
        return [CLASSIFIER] if self.is_resnet else heads_of(self._builder())

    def insert_into(self, model: nn.Module, *, body: str = "", example: Any = None) -> None:
        """Insert the block, if there is one; see `insert_at`."""
        if self.block is not None:
            insert_at(model, self.block, self.placement, body=body, example=example, **self.options)

    def load_into(self, model: nn.Module, *, heads: Sequence[str] = ()) -> list[str]:
        """Load the weights, if there are any; returns the `heads` that stay new, see `load_weights`."""
        if self.weights is None:
            return []
        for name in self.weights_without:
            if not any(key.startswith(f"{name}.") for key in model.state_dict()):
                network = type(model).__name__
                raise ValueError(f"weights_without: the {network} has no weights below {name!r}")
        return load_weights(model, self.weights, self.weights_without, heads=heads)


class ClassifierConfig(NetworkConfig):
    """The network; its classifier is always trained, and so is a block, wherever it is."""

    trainable_stages: int | None = Field(None, ge=0)
    """Number of stages trained, counted from the end, the stem being the first (default: all)."""
    zero_init_residual: bool = False
    """Start the last norm of every residual block at zero."""
    norm: Literal["batch", "sync", "frozen"] = "batch"
    """Batch statistics of each process, of all processes (GPU only), or frozen norms."""

    def build(self, num_classes: int, side: int = 224) -> nn.Module:
        """The network with its block, weights and norms; `side` is that of the images."""
        model = self._without_weights(num_classes, side)
        self._load_backbone(model)
        return self._with_norms(model)

    def check(self, num_classes: int, side: int = 224) -> list[str]:
        """Raise a SettingsError if the network cannot be built, without memory for it where that can be.

        Returns the names of layers that stay new since the weights have them for other classes.
        """
        self.check_files()
        with errors_at("model"):
            model = without_memory(lambda: self._checked(num_classes, side))
        with errors_at("model.weights"):
            new = self._load_backbone(model)
        self._with_norms(model)
        return new

    def _load_backbone(self, model: nn.Module) -> list[str]:
        """Load the weights, those of the classifier only if they are for as many classes."""
        if self.weights is None:
            return []
        heads = self.heads()
        try:
            return self.load_into(model, heads=heads)
        except MisfitError as error:
            if not all(key.startswith(tuple(f"{head}." for head in heads)) for key in error.keys):
                found = arch_of(read_state(self.weights)[0])
                if found in (None, self.arch):
                    raise
                raise MisfitError(
                    f"{error}. It has the weights of {found}: set arch to it", error.keys
                ) from None
            remedy = f"To train a new classifier, set weights_without to [{', '.join(heads)}]"
            raise MisfitError(f"{error}. {remedy}", error.keys) from error

    def _checked(self, num_classes: int, side: int) -> nn.Module:
        if not self.is_resnet:
            with errors_at("model.arch"):
                check_logits(self.network(num_classes), num_classes, side, self.arch)
        return self._without_weights(num_classes, side)

    def _without_weights(self, num_classes: int, side: int) -> nn.Module:
        if self.is_resnet:
            model = self.network(num_classes, zero_init_residual=self.zero_init_residual)
        elif self.zero_init_residual:
            raise ValueError(f"zero_init_residual is for ResNets; {self.arch} may have it in arch_options")
        else:
            model = self.network(num_classes)
        if self.trainable_stages is not None:
            freeze_stages(model, self.trainable_stages, self.heads())
        self.insert_into(model, example=None if self.is_resnet else torch.zeros(1, 3, side, side))
        return model

    def _with_norms(self, model: nn.Module) -> nn.Module:
        blocks = set(inserted(model))
        # Norms of stages that are not trained do not collect batch statistics either.
        freeze_norms(model, only_untrained=self.norm != "frozen")
        if self.norm == "sync":
            model = synchronised(model)
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


def arch_of(state: Mapping[str, Tensor]) -> str | None:
    """The ResNet of torchvision with weights like these, whatever its classes and blocks; or None."""

    def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        own = {key: value.shape for key, value in tensors.items() if ".polynl_" not in key}
        return {k: v for k, v in own.items() if not k.startswith(CLASSIFIER) and not k.endswith("_tracked")}

    given = shapes(state)
    for arch in archs()[1:]:
        if shapes(without_memory(partial(torchvision.models.get_model, arch)).state_dict()) == given:
            return arch
    return None


def move_strides(model: nn.Module, arch: str) -> None:
    """Downsample in the first 1×1 convolution of bottlenecks; a ValueError if there are none.

    The shapes stay the same, so weights do not tell which variant they need.
    """
    for stage in ("layer2", "layer3", "layer4"):
        first = next(iter(getattr(model, stage, ())), None)
        if not isinstance(first, Bottleneck):
            raise ValueError(f"stride_in_1x1 needs bottleneck blocks, and {arch} has none in {stage}")
        first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride


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
            choices, hint = ", ".join(PLACEMENTS), near_matches(name, modules)
            raise ValueError(
                f"placement must be one of {choices} or the name of a module, got {name!r}.{hint}"
            )
        for stage in PLACEMENTS.get(name, ()):
            blocks = getattr(network, stage, None)
            if not isinstance(blocks, nn.Sequential):
                raise ValueError(
                    f"placement {name!r} needs a {stage}, and {type(network).__name__} has none; name a "
                    f"module to put the block before, such as {_example_of_a_place(network, body)}"
                )
            targets.append(f"{body}.{stage}.{len(blocks) - 1}".removeprefix("."))
        if name not in PLACEMENTS:
            targets.append(name)
    return targets


def _example_of_a_place(network: nn.Module, body: str) -> str:
    """The last stage but one, which is where res4 is."""
    stages = stages_of(network) or [name for name, _ in network.named_children()]
    return f"{body}.{stages[max(0, len(stages) - 2)]}".removeprefix(".")
