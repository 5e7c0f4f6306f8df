"""The keys that recipes of several tasks share: the network, images with annotations, drawn scenes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torchvision
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from torch import nn

from polynl.blocks.registry import BLOCKS, check_options
from polynl.errors import SettingsError, near_matches
from polynl.models.classifiers import archs
from polynl.models.small_resnet import SmallResNet

# What the recipe says elsewhere, or cannot say.
NO_ARCH_OPTIONS = {"block", "layers", "num_classes", "zero_init_residual", "norm_layer"}

Side = Annotated[int, Field(gt=0)]
Split = Literal["train", "val"]


class Config(BaseModel):
    """A part of a recipe: an unknown key is an error, and the docstring below a key is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class NetworkConfig(Config):
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


class DetectorConfig(NetworkConfig):
    """A detector on a ResNet with a feature pyramid."""

    backbone_weights: Path | None = None
    """A file with weights of the ResNet alone, as ImageNet gives them; its classifier is left out."""
    trainable_stages: int | None = Field(None, ge=0)
    """Of the ResNet, so many from the end are trained; unless given three, or all if there are no weights."""
    norm: Literal["frozen", "batch", "sync"] = "frozen"
    """Of the ResNet: values stay as they are, or batch statistics of a process, or of all (GPU only)."""
    norm_eps: float | None = Field(None, ge=0)
    """Of frozen norms; 0 with torchvision's COCO_V1 weights."""
    fpn_channels: int = Field(256, gt=0)
    """Of every map of the pyramid."""
    min_size: Side | Annotated[list[Side], Field(min_length=1)] = 800
    """Images are resized to this shorter side; of several, training draws one and scoring takes the last."""
    max_size: Side = 1333
    """The longer side is no longer than this."""
    detector_options: dict[str, Any] = Field({})
    """Further arguments of torchvision's detector, such as nms_thresh."""

    def check_files(self) -> None:
        """The weights are there."""
        check_file("model.weights", self.weights)
        check_file("model.backbone_weights", self.backbone_weights)

    def arguments(self) -> dict[str, Any]:
        """All of it, as the functions of `polynl.tasks.instance_segmentation.model` take it."""
        sizes = {"min_size": self.min_size, "max_size": self.max_size}
        elsewhere = {"options", "detector_options", *sizes}
        return {
            **self.model_dump(exclude=elsewhere),
            **self.options,
            "detector_options": {**self.detector_options, **sizes},
        }


class AnnotatedConfig(Config):
    """Two folders of images, and for each a file that says what is on them."""

    root: Path
    """The folder that the others are in."""
    train: str
    """Its folder of training images."""
    val: str
    """Its folder of images to score on."""
    train_annotations: str
    """What is on the training images."""
    val_annotations: str
    """What is on the images to score on."""
    flip: float = Field(0.5, ge=0, le=1)
    """In training, the probability that an image is mirrored."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """What to do about an image that cannot be decoded: stop with its path, or skip and count it."""

    def check(self, *, training: bool) -> None:
        """Folders and files are there: those to score on and, for training, the others."""
        if not self.root.is_dir():
            raise SettingsError(
                f"data.root: there is no folder {self.root}.", hint=" Give yours: --data.root DIR"
            )
        splits = ("train", "val") if training else ("val",)
        for key in [*splits, *(f"{split}_annotations" for split in splits)]:
            path = self.root / getattr(self, key)
            is_file = key.endswith("annotations")
            if not (path.is_file() if is_file else path.is_dir()):
                there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
                raise SettingsError(
                    f"data.{key}: there is no {'file' if is_file else 'folder'} {path}."
                    f"{near_matches(path.name, sorted(there))}",
                    hint=f" Give yours, relative to data.root: --data.{key.replace('_', '-')} NAME",
                )

    def places(self, split: Split) -> tuple[Path, Path]:
        """The file of annotations and the folder of images."""
        return self.root / getattr(self, f"{split}_annotations"), self.root / getattr(self, split)


class DrawnConfig(Config):
    """Scenes drawn when a run begins."""

    source: Literal["scenes"]
    """Drawn when the run begins."""
    images: int = Field(2_000, gt=0)
    """Scenes to train on."""
    val_images: int = Field(200, gt=0)
    """Scenes to score on."""
    size: int = Field(64, ge=16)
    """Side in pixels."""
    difficulty: Literal["easy", "medium", "hard"] = "medium"
    """easy: two figures; medium: also distractors, turned and tinted; hard: three figures, more of it all."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of the scenes."""

    def check(self, *, training: bool) -> None:
        """Nothing can be missing."""

    def drawn_from(self, split: Split) -> dict[str, Any]:
        """What the scenes of a split depend on."""
        count = self.images if split == "train" else self.val_images
        same = {"size": self.size, "difficulty": self.difficulty, "seed": self.seed}
        return {"count": count, "split": split, **same}


class TaskConfig(Config):
    """What a recipe says of its task; a recipe is this and what `polynl.train` adds."""

    task: str
    """The task to train."""
    model: NetworkConfig
    data: Any


def check_known(
    options: Mapping[str, Any], of: Callable[..., Any], without: Collection[str], name: str
) -> None:
    """Raise a ValueError for an option that is no argument of what it is for, or of the wrong kind."""
    parameters = inspect.signature(of).parameters
    known = sorted(set(parameters) - set(without))
    for option, value in options.items():
        if option not in known:
            hint = near_matches(option, known)
            raise ValueError(f"{name} has no option {option!r}.{hint} There are: {', '.join(known)}.")
        numeric = isinstance(parameters[option].default, int | float)
        if numeric and not isinstance(value, int | float):
            raise ValueError(f"{option} of {name}: expected a number, got {value!r}")
        if option in ("image_mean", "image_std") and not _are_colours(value):
            raise ValueError(f"{option} of {name}: expected three numbers, got {value!r}")


def _are_colours(value: Any) -> bool:
    return isinstance(value, list) and [isinstance(part, int | float) for part in value] == [True] * 3


def check_file(key: str, path: Path | None) -> None:
    """Raise a SettingsError where a file that a recipe names is not there."""
    if path is not None and not path.is_file():
        option = f"--{key.replace('_', '-')}"
        raise SettingsError(
            f"{key}: there is no file {path}.", hint=f" Give yours: {option} FILE, or null for none"
        )


def built(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """The network, or a SettingsError of what it cannot be built with."""
    try:
        return build(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"model: {error}") from error
