"""What recipes of all tasks say about scenes that are drawn from a seed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from polynl.tasks.base import Part


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

    def check(self) -> None:
        """Nothing can be missing."""

    def splits(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What scenes to train and to score on are drawn from."""
        same = {"size": self.size, "difficulty": self.difficulty, "seed": self.seed}
        return (
            {"count": self.images, "split": "train", **same},
            {"count": self.val_images, "split": "val", **same},
        )
