"""Image classification: cross entropy, Top-1 and Top-5."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import torchvision
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from polynl.blocks.registry import BLOCKS, check_options
from polynl.data.classification import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FolderImages,
    Unreadable,
    UnreadableImageError,
    train_transform,
    val_transform,
)
from polynl.data.scenes import CLASSES, Scenes
from polynl.errors import SettingsError, near_matches
from polynl.models.classifiers import archs, resnet
from polynl.models.insert import inserted
from polynl.models.norms import freeze_norms
from polynl.models.small_resnet import SmallResNet
from polynl.models.weights import fitting_weights
from polynl.tasks.base import Batch, Images, Part, Scorer, Task

# What the recipe says elsewhere, or cannot say.
NO_ARCH_OPTIONS = {"block", "layers", "num_classes", "zero_init_residual", "norm_layer"}
Deviation = Annotated[float, Field(gt=0)]


class ClassifierPart(Part):
    """The network."""

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
    zero_init_residual: bool = False
    """Start the last norm of every residual block at zero."""
    stride_in_1x1: bool = False
    """Downsample in the 1×1 convolution of a bottleneck."""
    norm: Literal["batch", "sync", "frozen"] = "batch"
    """Batch statistics of a process, of all of them (GPU only), or none: values stay as they are."""

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
            known = sorted(set(inspect.signature(network).parameters) - NO_ARCH_OPTIONS)
            for name in options:
                if name not in known:
                    hint = near_matches(name, known)
                    raise ValueError(f"{arch} has no option {name!r}.{hint} There are: {', '.join(known)}.")
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


class ImageFolderPart(Part):
    """Images on disk: <root>/<train>/<class>/*.jpg, and <root>/<val> alike."""

    source: Literal["image_folder"]
    """Files in folders."""
    root: Path
    """The folder that has both splits."""
    train: str = "train"
    """Its folder of training images."""
    val: str = "val"
    """Its folder of images to score on."""
    size: int = Field(224, gt=0)
    """Side of the square images that the network sees."""
    resize: int = Field(256, gt=0, validate_default=True)
    """In scoring, the shorter side before the centre is cut out."""
    scale: tuple[float, float] = (0.08, 1.0)
    """In training, the part of an image's area that a random crop takes, from and to."""
    flip: float = Field(0.5, ge=0, le=1)
    """In training, the probability that an image is mirrored."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """What to do about an image that cannot be decoded: stop with its path, or skip and count it."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Of red, green and blue from 0 to 1; the network sees (image - mean) / std."""
    std: tuple[Deviation, Deviation, Deviation] = IMAGENET_STD
    """See `mean`."""

    @field_validator("scale")
    @classmethod
    def _part_of_an_area(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"expected [from, to] with 0 < from <= to <= 1; got {list(scale)}")
        return scale

    @field_validator("resize")
    @classmethod
    def _not_below_size(cls, resize: int, others: ValidationInfo) -> int:
        if resize < others.data.get("size", resize):
            raise ValueError(f"a side of {resize} is too short to cut size={others.data['size']} out of it")
        return resize

    def check(self) -> None:
        """Both folders are there, and have the same classes."""
        if not self.root.is_dir():
            raise SettingsError(f"data.root: there is no folder {self.root}. Give yours: --data.root DIR")
        classes = {}
        for split in (self.train, self.val):
            folder = self.root / split
            if not folder.is_dir():
                there = sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())
                raise SettingsError(
                    f"data.root: {self.root} has no folder {split!r}.{near_matches(split, there)}\n"
                    "Expected are <root>/train/<class>/ and <root>/val/<class>/; "
                    "other names: --data.train and --data.val."
                )
            classes[split] = {entry.name for entry in folder.iterdir() if entry.is_dir()}
            if len(classes[split]) < 2:
                found = ", ".join(classes[split]) or "none"
                raise SettingsError(
                    f"data.root: {folder} needs two folders of classes or more; found {found}."
                )
        odd = sorted(classes[self.train] ^ classes[self.val])
        if odd:
            raise SettingsError(
                f"data.root: {self.train} and {self.val} in {self.root} have different classes: "
                f"{', '.join(odd[:3])}{' …' if len(odd) > 3 else ''} only in one of them."
            )

    def classes(self) -> Sequence[str]:
        """The names of the folders, in the order that ImageFolder numbers them in."""
        return sorted(entry.name for entry in (self.root / self.train).iterdir() if entry.is_dir())

    def sets(self) -> tuple[FolderImages, FolderImages]:
        """For training and for scoring."""
        crops = train_transform(self.size, self.scale, self.flip), val_transform(self.size, self.resize)
        roots = self.root / self.train, self.root / self.val
        try:
            train, val = (
                FolderImages(root, crop, on_bad_image=self.on_bad_image)
                for root, crop in zip(roots, crops, strict=True)
            )
        except FileNotFoundError as error:
            raise SettingsError(f"data.root: {error}") from None
        return train, val


class ScenesPart(Part):
    """Scenes drawn from a seed: nothing to download."""

    source: Literal["scenes"]
    """Drawn when the run begins."""
    images: int = Field(20_000, gt=0)
    """Scenes to train on."""
    val_images: int = Field(2_000, gt=0)
    """Scenes to score on."""
    size: int = Field(40, ge=16)
    """Side in pixels."""
    difficulty: Literal["easy", "medium", "hard"] = "medium"
    """easy: two figures; medium: also distractors, turned and tinted; hard: three figures, more of it all."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of the scenes."""
    mean: tuple[float, float, float] = (0.3, 0.3, 0.3)
    """Of red, green and blue from 0 to 1; the network sees (image - mean) / std."""
    std: tuple[Deviation, Deviation, Deviation] = (0.25, 0.25, 0.25)
    """See `mean`."""

    def check(self) -> None:
        """Nothing can be missing."""

    def classes(self) -> Sequence[str]:
        """The shapes."""
        return CLASSES

    def sets(self) -> tuple[Scenes, Scenes]:
        """For training and for scoring."""
        train, val = (
            Scenes(count, size=self.size, difficulty=self.difficulty, split=split, seed=self.seed)
            for count, split in ((self.images, "train"), (self.val_images, "val"))
        )
        return train, val


class LossPart(Part):
    """Cross entropy."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """The part of a target that is spread over all classes."""


class Classification(Task):
    """Scored by `top1` and, with five classes or more, `top5`, in percent."""

    best_by = "top1"

    def __init__(self, model: ClassifierPart, data: ImageFolderPart | ScenesPart, loss: LossPart) -> None:
        self._model, self._data, self._loss = model, data, loss
        self._sets: tuple[Any, Any] | None = None

    def check(self) -> None:
        """The data and the weights are there, and the network can be built."""
        self._data.check()
        weights = self._model.weights
        if weights is not None and not weights.is_file():
            raise SettingsError(f"model.weights: there is no file {weights}.")
        # Without memory or time: a network that cannot be built is refused before the images are looked at.
        with torch.device("meta"):
            model = self._network()
        if weights is not None:
            try:
                fitting_weights(model, weights)
            except ValueError as error:
                raise SettingsError(f"model.weights: {error}") from error
        self._with_norms(model)

    @property
    def _both_sets(self) -> tuple[Any, Any]:
        if self._sets is None:
            self._sets = self._data.sets()
        return self._sets

    @property
    def classes(self) -> Sequence[str]:
        """Their names, in the order of the labels."""
        return self._data.classes()

    def train_set(self) -> Images:
        """(image as uint8, label)."""
        return self._both_sets[0]

    def val_set(self) -> Images:
        """(image as uint8, label)."""
        return self._both_sets[1]

    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """Stack what could be read; in training the readable ones fill the places of the others."""
        good = [sample for sample in samples if not isinstance(sample, Unreadable)]
        bad = tuple(sample.reason for sample in samples if isinstance(sample, Unreadable))
        if training:
            if not good:
                raise UnreadableImageError(f"no image of a batch of {len(samples)} can be read; {bad[0]}")
            good = [good[number % len(good)] for number in range(len(samples))]
        if not good:
            return Batch(torch.empty(0, 3, 1, 1), torch.empty(0, dtype=torch.long), bad)
        return Batch(
            torch.stack([image for image, _ in good]), torch.tensor([label for _, label in good]), bad
        )

    def model(self) -> nn.Module:
        """The network, with as many outputs as there are classes."""
        return self._with_norms(self._network(weights=self._model.weights))

    def _network(self, weights: Path | None = None) -> nn.Module:
        part = self._model
        try:
            return resnet(
                part.arch,
                block=part.block,
                placement=part.placement,
                weights=weights,
                num_classes=len(self.classes),
                zero_init_residual=part.zero_init_residual,
                stride_in_1x1=part.stride_in_1x1,
                arch_options=part.arch_options,
                **part.options,
            )
        except (ValueError, TypeError) as error:
            raise SettingsError(f"model: {error}") from error

    def _with_norms(self, model: nn.Module) -> nn.Module:
        blocks = set(inserted(model))
        if self._model.norm == "frozen":
            freeze_norms(model)
        elif self._model.norm == "sync":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if lost := blocks - set(inserted(model)):
            raise SettingsError(
                f"model.norm: {self._model.norm} replaces the norm that {', '.join(lost)} stands before; "
                "choose another model.placement."
            )
        return model

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """What the model says of uint8 images."""
        mean, std = (
            torch.tensor(values, device=images.device).mul(255)[:, None, None]
            for values in (self._data.mean, self._data.std)
        )
        return model((images.float() - mean) / std)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The cross entropy."""
        logits = self.logits(model, batch.images)
        smoothing = self._loss.label_smoothing
        return {"cross_entropy": F.cross_entropy(logits.float(), batch.targets, label_smoothing=smoothing)}

    def scorer(self, device: torch.device) -> Scorer:
        """Top-1 and Top-5."""
        return TopK(self, len(self.classes), device)


class TopK:
    """The share of images whose class is among the k that the model finds likeliest, in percent."""

    def __init__(self, task: Classification, classes: int, device: torch.device) -> None:
        self._task = task
        # Sums of counts, added over processes: shares of any size give the figure of one process.
        self._metrics = {
            f"top{k}": MulticlassAccuracy(classes, top_k=k, average="micro").to(device)
            for k in (1, 5)
            if k <= classes
        }

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Count the right ones of a batch."""
        logits = self._task.logits(model, batch.images).float()
        for metric in self._metrics.values():
            metric.update(logits, batch.targets)

    def compute(self) -> dict[str, float]:
        """The shares over all processes."""
        return {name: 100 * metric.compute().item() for name, metric in self._metrics.items()}


ClassificationData = Annotated[ImageFolderPart | ScenesPart, Field(discriminator="source")]
