"""Image classification: cross entropy, Top-1 and Top-5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torchvision.transforms.v2 import Transform

from polynl.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FolderImages,
    train_transform,
    val_transform,
)
from polynl.data.scenes import CLASSES, Scenes
from polynl.errors import SettingsError, near_matches
from polynl.insertion import inserted
from polynl.models.classifiers import resnet
from polynl.models.norms import freeze_norms
from polynl.models.weights import fitting_weights
from polynl.tasks.base import Batch, Images, PaperTable, Scorer, Task, readable
from polynl.tasks.config import Config, DrawnConfig, NetworkConfig, Split, TaskConfig, built, check_file

Deviation = Annotated[float, Field(gt=0)]


class ClassifierConfig(NetworkConfig):
    """The network."""

    zero_init_residual: bool = False
    """Start the last norm of every residual block at zero."""
    norm: Literal["batch", "sync", "frozen"] = "batch"
    """Batch statistics of a process, of all of them (GPU only), or none: values stay as they are."""


class ImageFolderConfig(Config):
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

    def check(self, *, training: bool) -> None:
        """The folder to score on is there and, for training, the other one with the same classes."""
        if not self.root.is_dir():
            raise SettingsError(
                f"data.root: there is no folder {self.root}.", hint=" Give yours: --data.root DIR"
            )
        classes = {}
        for split in (self.train, self.val) if training else (self.val,):
            folder = self.root / split
            if not folder.is_dir():
                there = sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())
                raise SettingsError(
                    f"data.root: {self.root} has no folder {split!r}.{near_matches(split, there)}",
                    hint="\nExpected are <root>/train/<class>/ and <root>/val/<class>/; "
                    "other names: --data.train and --data.val.",
                )
            classes[split] = {entry.name for entry in folder.iterdir() if entry.is_dir()}
            if len(classes[split]) < 2:
                found = ", ".join(classes[split]) or "none"
                raise SettingsError(
                    f"data.root: {folder} needs two folders of classes or more; found {found}."
                )
        odd = sorted(set.symmetric_difference(*classes.values())) if training else []
        if odd:
            raise SettingsError(
                f"data.root: {self.train} and {self.val} in {self.root} have different classes: "
                f"{', '.join(odd[:3])}{' …' if len(odd) > 3 else ''} only in one of them."
            )

    def classes(self) -> Sequence[str]:
        """The names of the folders, in the order that ImageFolder numbers them in."""
        return sorted(entry.name for entry in (self.root / self.val).iterdir() if entry.is_dir())

    def view(self) -> Transform:
        """What is made of an image to score on."""
        return val_transform(self.size, self.resize)

    def images_of(self, split: Split) -> FolderImages:
        """To train on, or to score on."""
        train = split == "train"
        crop = train_transform(self.size, self.scale, self.flip) if train else self.view()
        try:
            return FolderImages(
                self.root / (self.train if train else self.val), crop, on_bad_image=self.on_bad_image
            )
        except FileNotFoundError as error:
            raise SettingsError(f"data.root: {error}") from None


class ScenesConfig(DrawnConfig):
    """Scenes drawn from a seed: nothing to download."""

    images: int = Field(20_000, gt=0)
    """Scenes to train on."""
    val_images: int = Field(2_000, gt=0)
    """Scenes to score on."""
    size: int = Field(40, ge=16)
    """Side in pixels."""
    mean: tuple[float, float, float] = (0.3, 0.3, 0.3)
    """Of red, green and blue from 0 to 1; the network sees (image - mean) / std."""
    std: tuple[Deviation, Deviation, Deviation] = (0.25, 0.25, 0.25)
    """See `mean`."""

    def classes(self) -> Sequence[str]:
        """The shapes."""
        return CLASSES

    def view(self) -> Transform:
        """What is made of an image of another size."""
        return val_transform(self.size, self.size)

    def images_of(self, split: Split) -> Scenes:
        """To train on, or to score on."""
        return Scenes(**self.drawn_from(split))


class LossConfig(Config):
    """Cross entropy."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """The part of a target that is spread over all classes."""


ClassificationData = Annotated[ImageFolderConfig | ScenesConfig, Field(discriminator="source")]


class ClassificationConfig(TaskConfig):
    """Images of one class each."""

    model: ClassifierConfig = ClassifierConfig()
    data: ClassificationData
    loss: LossConfig = LossConfig()


class Classification(Task):
    """Scored by `top1` and, with five classes or more, `top5`, in percent."""

    name = "classification"
    config = ClassificationConfig
    scores = {"top1": "Top-1", "top5": "Top-5"}  # noqa: RUF012
    best_by = "top1"
    headline = ("top1", "top5")
    paper = PaperTable(
        "ResNet-50 on ImageNet",
        ("top1", "top5"),
        {
            "none": (75.62, 92.68),
            "non_local": (76.09, 93.00),
            "tesa": (76.49, 93.05),
            "latent_gnn": (75.28, 92.33),
            "efficient_nl": (75.86, 93.02),
            "poly_nl": (76.30, 93.06),
        },
    )

    def __init__(self, config: ClassificationConfig, labels: Mapping[int, str] | None = None) -> None:
        self._model, self._data, self._loss = config.model, config.data, config.loss
        self._labels = None if labels is None else dict(labels)
        self._sets: dict[Split, FolderImages | Scenes] = {}

    def check(self, *, training: bool = True) -> None:
        """The data and the weights are there, and the network can be built."""
        self._data.check(training=training)
        if training:
            self._check_network()

    def _check_network(self) -> None:
        weights = self._model.weights
        check_file("model.weights", weights)
        # Without memory or time: a network that cannot be built is refused before the images are looked at.
        with torch.device("meta"):
            model = self._network()
        if weights is not None:
            try:
                fitting_weights(model, weights, self._model.weights_without)
            except ValueError as error:
                raise SettingsError(f"model.weights: {error}") from error
        self._with_norms(model)

    def _images(self, split: Split) -> FolderImages | Scenes:
        if split not in self._sets:
            self._sets[split] = self._data.images_of(split)
        return self._sets[split]

    def labels(self) -> dict[int, str]:
        """The names of the classes."""
        return dict(enumerate(self._data.classes())) if self._labels is None else self._labels

    def train_set(self) -> Images:
        """(image as uint8, label)."""
        return self._images("train")

    def val_set(self) -> Images:
        """(image as uint8, label)."""
        return self._images("val")

    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """Stack what could be read; in training the readable ones fill the places of the others."""
        good, bad = readable(samples, training=training)
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
        return built(
            resnet,
            part.arch,
            block=part.block,
            placement=part.placement,
            weights=weights,
            weights_without=part.weights_without,
            num_classes=len(self.labels()),
            zero_init_residual=part.zero_init_residual,
            stride_in_1x1=part.stride_in_1x1,
            arch_options=part.arch_options,
            **part.options,
        )

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

    def view(self) -> Transform:
        """From a uint8 image to the part that the network sees in scoring, at the size it sees it in."""
        return self._data.view()

    def inputs(self, image: Tensor) -> Tensor:
        """A batch of one image, normalised."""
        return self._normalised(image.unsqueeze(0))

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """What the model says of uint8 images."""
        return model(self._normalised(images))

    def _normalised(self, images: Tensor) -> Tensor:
        """Uint8 images as the network takes them."""
        mean, std = (
            torch.tensor(values, device=images.device).mul(255)[:, None, None]
            for values in (self._data.mean, self._data.std)
        )
        return (images.float() - mean) / std

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The cross entropy."""
        logits = self.logits(model, batch.images)
        smoothing = self._loss.label_smoothing
        return {"cross_entropy": F.cross_entropy(logits.float(), batch.targets, label_smoothing=smoothing)}

    def scorer(self) -> Scorer:
        """Top-1 and Top-5."""
        return TopK(self, len(self.labels()))


class TopK:
    """The share of images whose class is among the k that the model finds likeliest, in percent."""

    def __init__(self, task: Classification, classes: int) -> None:
        self._task = task
        self._images = 0
        self._right = {k: 0 for k in (1, 5) if k <= classes}

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Count the right ones of a batch."""
        logits = self._task.logits(model, batch.images).float()
        self._images += len(batch)
        for k in self._right:
            found = logits.topk(k).indices == batch.targets[:, None]
            self._right[k] += int(found.any(dim=1).sum())

    def share(self) -> tuple[int, dict[int, int]]:
        """The images, and how many of them are right for each k."""
        return self._images, self._right

    def compute(self, shares: Sequence[tuple[int, dict[int, int]]]) -> dict[str, float]:
        """Counts are added, so that shares of any size give the figure of one process."""
        images = sum(share for share, _ in shares)
        return {f"top{k}": 100 * sum(right[k] for _, right in shares) / images for k in self._right}
