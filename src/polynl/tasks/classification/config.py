"""The keys of classification: image folders or scenes, the network, the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from torchvision.transforms.v2 import Transform

from polynl.config import Config, Fractions, Side
from polynl.data.config import Drawn, SceneOptions, Split
from polynl.data.images import val_transform
from polynl.data.scenes import CLASSES, Scenes
from polynl.errors import SettingsError, near_matches, shortened
from polynl.models.resnet import ClassifierConfig
from polynl.tasks.classification.data import FolderImages, train_transform
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

    source: Literal["image_folder"]
    train: str = "train"
    val: str = "val"
    size: Side = 224
    """Side of the square images that the network sees."""
    resize: Side = Field(256, validate_default=True)
    """In scoring, the shorter side before the centre crop."""
    scale: Fractions = (0.08, 1.0)
    """Area of a random crop in training, as a fraction of the image: [from, to]."""

    @field_validator("resize")
    @classmethod
    def _not_below_size(cls, resize: int, others: ValidationInfo) -> int:
        if resize < others.data.get("size", resize):
            raise ValueError(f"a side of {resize} is too short to cut size={others.data['size']} out of it")
        return resize

    def check(self, *, training: bool) -> None:
        """Raise a SettingsError if a folder is missing, or if the splits have different classes."""
        self.check_root()
        classes = {}
        for split in (self.train, self.val) if training else (self.val,):
            folder = self.root / split
            if not folder.is_dir():
                there = sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())
                raise SettingsError(
                    f"data.root: {self.root} has no folder {split!r}.{near_matches(split, there)}",
                    hint="\nExpected <root>/train/<class>/ and <root>/val/<class>/; "
                    "for other names use --data.train and --data.val.",
                )
            classes[split] = {entry.name for entry in folder.iterdir() if entry.is_dir()}
            if len(classes[split]) < 2:
                found = ", ".join(classes[split]) or "none"
                raise SettingsError(
                    f"data.root: {folder} needs at least two folders of classes; found {found}."
                )
        odd = sorted(set.symmetric_difference(*classes.values())) if training else []
        if odd:
            raise SettingsError(
                f"data.root: {self.train} and {self.val} in {self.root} have different classes: "
                f"{shortened(odd)} only in one of them."
            )

    def classes(self) -> Sequence[str]:
        """The names of the folders, in the order that ImageFolder numbers them in."""
        return sorted(entry.name for entry in (self.root / self.val).iterdir() if entry.is_dir())

    def view(self) -> Transform:
        """How images to score on are resized and cropped."""
        return val_transform(self.size, self.resize)

    def load(self, split: Split) -> FolderImages:
        """The images of a split."""
        train = split == "train"
        crop = train_transform(self.size, self.scale, self.flip) if train else self.view()
        try:
            return FolderImages(
                self.root / (self.train if train else self.val), crop, on_bad_image=self.on_bad_image
            )
        except FileNotFoundError as error:
            raise SettingsError(f"data.root: {error}") from None


class ScenesConfig(NormalisedConfig, SceneOptions, FromScenes):
    """Scenes drawn from a seed: nothing to download."""

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


class ClassificationConfig(TaskConfig):
    """Images that each show one class."""

    model: ClassifierConfig = ClassifierConfig()
    data: Annotated[ImageFolderConfig | ScenesConfig, Field(discriminator="source")]
    loss: LossConfig = LossConfig()
