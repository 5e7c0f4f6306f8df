"""What recipes of detectors say about images on disk and what is on them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from polynl.errors import SettingsError, near_matches
from polynl.tasks.base import Part, Split


class AnnotatedPart(Part):
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
            raise SettingsError(f"data.root: there is no folder {self.root}. Give yours: --data.root DIR")
        splits = ("train", "val") if training else ("val",)
        for key in [*splits, *(f"{split}_annotations" for split in splits)]:
            path = self.root / getattr(self, key)
            is_file = key.endswith("annotations")
            if not (path.is_file() if is_file else path.is_dir()):
                there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
                raise SettingsError(
                    f"data.{key}: there is no {'file' if is_file else 'folder'} {path}."
                    f"{near_matches(path.name, sorted(there))} "
                    f"Give yours, relative to data.root: --data.{key.replace('_', '-')} NAME"
                )

    def places(self, split: Split) -> tuple[Path, Path]:
        """The file of annotations and the folder of images."""
        return self.root / getattr(self, f"{split}_annotations"), self.root / getattr(self, split)
