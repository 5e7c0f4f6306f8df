"""The keys of classification: image folders or scenes, the network, the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from torchvision.transforms.v2 import InterpolationMode, Transform

from polynl.config import NEUTRAL, Config, Fractions, Side
from polynl.data.config import Drawn, SceneOptions, Split
from polynl.data.images import val_transform
from polynl.data.labels import read_labels
from polynl.data.scenes import CLASSES, Scenes
from polynl.errors import SettingsError, near_matches, shortened
from polynl.models.resnet import ClassifierConfig
from polynl.tasks.classification.data import FolderImages, class_folders, train_transform
from polynl.tasks.classification.imagenet import IMAGENET_NAMES
from polynl.tasks.config import FilesConfig, FlipConfig, FromScenes, TaskConfig

Colour = tuple[float, float, float]
Deviation = Annotated[float, Field(gt=0)]
Deviations = tuple[Deviation, Deviation, Deviation]


class NormalisedConfig(Config):
    """Images that are normalised before the network sees them."""

    mean: Colour = (0.485, 0.456, 0.406)
    """Mean of red, green and blue, from 0 to 1; the network sees (image - mean) / std."""
    std: Deviations = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue, see `mean`."""


class ImageFolderConfig(NormalisedConfig, FlipConfig, FilesConfig):
    """Images on disk: <root>/<train>/<class>/*.jpg, and likewise <root>/<val>."""

    about: ClassVar[str] = "Images in one folder per class; the label of an image is the name of its folder."
    source: Literal["image_folder"]
    train: str = "train"
    val: str = "val"
    size: Side = 224
    """Side of the square images that the network sees."""
    resize: Side = Field(256, validate_default=True)
    """In scoring, the shorter side before the centre crop."""
    scale: Fractions = (0.08, 1.0)
    """Area of a random crop in training, as a fraction of the image: [from, to]."""
    colour_jitter: float = Field(0.0, ge=0, le=1)
    """In training, change brightness, contrast and saturation at random, by up to this fraction."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized; as for the weights that training starts from."""
    upright: bool = False
    """Turn photos upright by their EXIF orientation, as `polynl predict` does."""
    held_out: float | None = Field(None, gt=0, lt=1)
    """Score on this share of the images in `train`, which are not trained on (default: on those in `val`)."""
    labels: Path | None = Field(None, json_schema_extra=NEUTRAL)
    """Names of the classes: a line for each, in the order of the sorted folders, or JSON by number."""

    @field_validator("resize")
    @classmethod
    def _not_below_size(cls, resize: int, others: ValidationInfo) -> int:
        if resize < others.data.get("size", resize):
            raise ValueError(f"a side of {resize} is too short to cut size={others.data['size']} out of it")
        return resize

    def check(self, *, training: bool) -> None:
        """Raise a SettingsError if a folder is missing, or if the splits have different classes."""
        self.check_root()
        classes: dict[str, set[str]] = {}
        for split in dict.fromkeys([self.train, self._scored] if training else [self._scored]):
            folder = self.root / split
            if not folder.is_dir():
                there = sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())
                raise SettingsError(
                    f"data.root: {self.root} has no folder {split!r}.{near_matches(split, there)}",
                    hint="\nExpected <root>/train/<class>/ and <root>/val/<class>/; "
                    "for other names use --data.train and --data.val.\n"
                    "If there is one folder of classes, name it with --data.train (. is <root> itself), and "
                    "hold out a share of its images with --data.held-out 0.2.",
                )
            classes[split] = set(class_folders(folder))
            if len(classes[split]) < 2:
                found = ", ".join(classes[split]) or "none"
                raise SettingsError(
                    f"data.root: {folder} needs at least two folders of classes; found {found}.",
                    hint=" Put the images of each class into a folder of its own, named after the class.",
                )
        if training:
            self._check_classes(classes[self.train], classes[self._scored])

    def _check_classes(self, trained: set[str], scored: set[str]) -> None:
        """Raise a SettingsError if the splits have different classes, or `labels` names more or fewer."""
        if trained != scored:
            only = {self.train: sorted(trained - scored), self.val: sorted(scored - trained)}
            said = "; ".join(f"only {split} has {shortened(names)}" for split, names in only.items() if names)
            raise SettingsError(
                f"data.root: {self.train} and {self.val} in {self.root} have different classes: {said}."
            )
        if len(self.classes()) != len(trained):
            raise SettingsError(
                f"data.labels: {self.labels} names {len(self.classes())} classes; "
                f"{self.root / self.train} has {len(trained)} folders."
            )

    def classes(self) -> Sequence[str]:
        """The names in `labels`, or those of the folders, in the order that ImageFolder numbers them in.

        If there are no images, as for weights that somebody else has trained, the classes are ImageNet's.
        """
        if self.labels is not None:
            names = read_labels(self.labels, "data.labels")
            if unnamed := set(range(len(names))) - names.keys():
                raise SettingsError(
                    f"data.labels: {self.labels} has no name for class {min(unnamed)}; classes are numbered "
                    "from 0, in the order of the sorted folders."
                )
            return list(names.values())
        folder = self.root / self._scored
        if not folder.is_dir():
            return list(IMAGENET_NAMES.values())
        return class_folders(folder)

    @property
    def _scored(self) -> str:
        """The folder of the images to score on."""
        return self.val if self.held_out is None else self.train

    def view(self) -> Transform:
        """How images to score on are resized and cropped."""
        return val_transform(self.size, self.resize, InterpolationMode(self.interpolation))

    def _augmented(self) -> Transform:
        """How images to train on are cropped, flipped and coloured."""
        interpolation = InterpolationMode(self.interpolation)
        return train_transform(
            self.size, self.scale, self.flip, jitter=self.colour_jitter, interpolation=interpolation
        )

    def load(self, split: Split) -> FolderImages:
        """The images of a split."""
        train = split == "train"
        try:
            images = FolderImages(
                self.root / (self.train if train else self._scored),
                self._augmented() if train else self.view(),
                on_bad_image=self.on_bad_image,
                upright=self.upright,
                part=None if self.held_out is None else (split, self.held_out),
            )
        except FileNotFoundError as error:
            raise SettingsError(f"data.root: {error}") from None
        if len(images) == 0:
            folder = self.root / self.train
            raise SettingsError(f"data.held_out: no image can be held out: each class in {folder} has one.")
        return images


class ScenesConfig(NormalisedConfig, SceneOptions, FromScenes):
    """Scenes drawn from a seed: nothing to download."""

    about: ClassVar[str] = (
        "Drawn scenes with coloured figures along two sides and a coloured square, the cue, in the corner "
        "across. The label is the shape of the figure that has the colour of the cue, so a network has to "
        "relate distant places; one that sees locally can only guess among the figures."
    )
    images: Drawn = 20_000
    val_images: Drawn = 2_000
    size: Annotated[Side, Field(ge=16)] = 40
    mean: Colour = (0.3, 0.3, 0.3)
    std: Deviations = (0.25, 0.25, 0.25)

    def classes(self) -> Sequence[str]:
        """The shapes."""
        return CLASSES

    def view(self) -> Transform:
        """How an image of another size is resized."""
        return val_transform(self.size, self.size)

    def load(self, split: Split) -> Scenes:
        """The images of a split."""
        return Scenes(**self.drawn_from(split))


class LossConfig(Config):
    """Cross entropy."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread over all classes."""
    mixup: float = Field(0.0, ge=0)
    """Mix pairs of images and their labels by a share drawn from Beta(mixup, mixup); 0: do not mix."""


class ClassificationConfig(TaskConfig):
    """Images that each show one class."""

    model: ClassifierConfig = ClassifierConfig()
    data: Annotated[ImageFolderConfig | ScenesConfig, Field(discriminator="source")]
    loss: LossConfig = LossConfig()
