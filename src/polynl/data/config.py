"""Options of images drawn from a seed, for recipes and for `polynl data scenes`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from polynl.config import Config, Side, mistakes
from polynl.errors import SettingsError

Split = Literal["train", "val"]
# The number of images to draw, and their size in memory.
Drawn = Annotated[int, Field(gt=0, le=500_000)]
MOST_GIGABYTES = 4


class DrawnConfig(Config):
    """Images drawn from a seed: nothing to download."""

    images: Drawn = 2_000
    """Number of training images."""
    val_images: Drawn = 200
    """Number of validation images."""
    size: Annotated[Side, Field(ge=16)] = 64
    """Side of an image in pixels."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Random seed of the images."""

    def check(self, *, training: bool) -> None:
        """Raise a SettingsError if the images would not fit into memory; nothing can be missing."""
        count = self.val_images + (self.images if training else 0)
        needed = count * 3 * self.size**2 / 1e9
        if needed > MOST_GIGABYTES:
            raise SettingsError(
                f"data.size: {count:,} images of {self.size} × {self.size} pixels take {needed:,.0f} GB of "
                f"memory; at most {MOST_GIGABYTES} GB are drawn."
            )

    def drawn_from(self, split: Split) -> dict[str, Any]:
        """What the images of a split depend on."""
        count = self.images if split == "train" else self.val_images
        return {"count": count, "size": self.size, "split": split, "seed": self.seed}


class SceneOptions(DrawnConfig):
    """Scenes whose label is a relation between distant objects."""

    difficulty: Literal["easy", "medium", "hard"] = "medium"
    """easy: two figures; medium: also distractors, turned and tinted; hard: three figures and more of all."""

    def drawn_from(self, split: Split) -> dict[str, Any]:
        """What the scenes of a split depend on."""
        return {**super().drawn_from(split), "difficulty": self.difficulty}


class SceneFiles(SceneOptions):
    """Scenes to write to files."""

    images: Drawn = 1_000
    size: Annotated[Side, Field(ge=16, le=512)] = 128

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            message = mistakes(error, type(self).model_fields, lambda key: f"--{key.replace('_', '-')}")
            raise SettingsError(message) from None
