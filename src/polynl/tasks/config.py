"""Keys that the recipes of several tasks share: images in files, with annotations or drawn from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from polynl.config import NEUTRAL, Config, Probability
from polynl.data.config import Split
from polynl.errors import SettingsError, near_matches
from polynl.models.resnet import NetworkConfig


class SourceConfig(Config):
    """A data set; its source says which other keys it has."""

    source: str
    """Where images come from: files of this kind, or scenes, which are drawn when the run starts."""
    about: ClassVar[str] = ""
    """What the images show, and what a network is to say of them; reports quote it."""


class FromScenes(SourceConfig):
    """Images that are drawn."""

    source: Literal["scenes"]


class FlipConfig(Config):
    """The augmentation that tasks share."""

    flip: Probability = 0.5
    """Probability of a horizontal flip in training."""


class FilesConfig(SourceConfig):
    """Two folders of images."""

    root: Path = Field(json_schema_extra=NEUTRAL)
    """Folder of the data set."""
    train: str
    """Folder of the training images, relative to root."""
    val: str
    """Folder of the validation images, relative to root."""
    on_bad_image: Literal["stop", "skip"] = Field("stop", json_schema_extra=NEUTRAL)
    """If an image cannot be decoded: stop with its path, or skip and count it."""

    def holding(self, path: Path) -> Path | None:
        """The folder of images that a path is in, if it is in one: files there would be read as images."""
        folders = (self.root / self.train, self.root / self.val)
        place = path.resolve()
        return next((folder for folder in folders if place.is_relative_to(folder.resolve())), None)

    def check_root(self) -> None:
        """Raise a SettingsError if there is no such folder."""
        if not self.root.is_dir():
            raise SettingsError(
                f"data.root: no such folder: {self.root}.", hint=" Give yours: --data.root DIR"
            )


class AnnotatedConfig(FlipConfig, FilesConfig):
    """Two folders of images, each with a file of annotations."""

    train_annotations: str
    """Annotations of the training images, relative to root."""
    val_annotations: str
    """Annotations of the validation images, relative to root."""

    def check(self, *, training: bool) -> None:
        """Raise a SettingsError if a folder or file is missing; without `training`, for val only."""
        self.check_root()
        splits = ("train", "val") if training else ("val",)
        for key in [*splits, *(f"{split}_annotations" for split in splits)]:
            path = self.root / getattr(self, key)
            is_file = key.endswith("annotations")
            if not (path.is_file() if is_file else path.is_dir()):
                there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
                raise SettingsError(
                    f"data.{key}: no such {'file' if is_file else 'folder'}: {path}."
                    f"{near_matches(path.name, sorted(there))}",
                    hint=f" Give yours, relative to data.root: --data.{key.replace('_', '-')} NAME",
                )

    def places(self, split: Split) -> tuple[Path, Path]:
        """The annotation file and the folder of images."""
        return self.root / getattr(self, f"{split}_annotations"), self.root / getattr(self, split)


class TaskConfig(Config):
    """The task's part of a recipe; `polynl.train` adds the keys of training."""

    task: str
    """Task to train."""
    model: NetworkConfig
    data: Any
