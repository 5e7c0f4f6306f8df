"""What recipes of all tasks say about scenes that are drawn from a seed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from polynl.tasks.base import Part, Split


class DrawnPart(Part):
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
