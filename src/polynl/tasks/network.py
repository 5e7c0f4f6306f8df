"""What recipes of all tasks say about the network and the block in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import torchvision
from pydantic import Field, ValidationInfo, field_validator
from torch import nn

from polynl.blocks.registry import BLOCKS, check_options
from polynl.errors import SettingsError, near_matches
from polynl.models.classifiers import archs
from polynl.models.small_resnet import SmallResNet
from polynl.tasks.base import Part

# What the recipe says elsewhere, or cannot say.
NO_ARCH_OPTIONS = {"block", "layers", "num_classes", "zero_init_residual", "norm_layer"}


class NetworkPart(Part):
    """A ResNet with a block in it."""

    arch: str = "resnet50"
    """A ResNet, ResNeXt or Wide ResNet of torchvision, or small_resnet."""
    arch_options: dict[str, Any] = Field({})
    """Further arguments of the network, for small_resnet depth, width and dropout."""
    block: str | None = None
    """The block to insert, or none."""
    options: dict[str, Any] = Field({})
    """The block's options."""
    placement: str | Annotated[list[str], Field(min_length=1)] = "res4"
    """Where: res3, res4, res5, res345, or names of modules to go before."""
    weights: Path | None = None
    """A file to start from, safetensors or a state dict."""
    weights_without: list[str] = Field([])
    """Modules that the file is not asked for, since they are for other classes: [fc] for one."""
    stride_in_1x1: bool = False
    """Downsample in the 1×1 convolution of a bottleneck."""

    @field_validator("block", mode="before")
    @classmethod
    def _none(cls, name: Any) -> Any:
        return None if name == "none" else name

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
            network = SmallResNet if arch == "small_resnet" else torchvision.models.ResNet
            check_known(options, network, NO_ARCH_OPTIONS, arch)
        return options

    @field_validator("block")
    @classmethod
    def _known_block(cls, block: str | None) -> str | None:
        if block is not None and block not in BLOCKS:
            hint = near_matches(block, BLOCKS)
            raise ValueError(f"no block is called {block!r}.{hint} There are: none, {', '.join(BLOCKS)}.")
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
        return options


def check_known(
    options: Mapping[str, Any], of: Callable[..., Any], without: Collection[str], name: str
) -> None:
    """Raise a ValueError for an option that is no argument of what it is for, or is given elsewhere."""
    known = sorted(set(inspect.signature(of).parameters) - set(without))
    for option in options:
        if option not in known:
            hint = near_matches(option, known)
            raise ValueError(f"{name} has no option {option!r}.{hint} There are: {', '.join(known)}.")


def check_file(key: str, path: Path | None) -> None:
    """Raise a SettingsError where a file that a recipe names is not there."""
    if path is not None and not path.is_file():
        raise SettingsError(f"{key}: there is no file {path}.")


def built(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """The network, or a SettingsError of what it cannot be built with."""
    try:
        return build(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"model: {error}") from error
