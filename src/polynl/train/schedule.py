"""The learning rate as a function of the step alone, so that a resumed run needs no state of it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator

from polynl.tasks.config import Config


class ScheduleConfig(Config):
    """How the learning rate goes over a run."""

    name: Literal["constant", "steps", "cosine"] = "steps"
    """What follows the rise: nothing, a drop at each of the milestones, or half a cosine down to the end."""
    warmup_epochs: float = Field(0.0, ge=0)
    """Rise linearly to the full rate over so many epochs, step by step."""
    warmup_from: float = Field(0.0, ge=0, le=1)
    """The part of the full rate that the rise begins at."""
    milestones: tuple[int, ...] = ()
    """Of `steps`: the epochs after which the rate is multiplied by `gamma`."""
    gamma: float = Field(0.1, gt=0, le=1)
    """Of `steps`."""
    final: float = Field(0.0, ge=0, le=1)
    """Of `cosine`: the part of the full rate that the run ends at."""

    @field_validator("milestones")
    @classmethod
    def _rising(cls, milestones: tuple[int, ...]) -> tuple[int, ...]:
        if any(later <= earlier for earlier, later in zip((0, *milestones), milestones, strict=False)):
            raise ValueError(f"expected epochs above 0 in rising order; got {list(milestones)}")
        return milestones

    def factor(self, step: int, steps_per_epoch: int, epochs: int) -> float:
        """What the highest learning rate is multiplied by at a step, counted from 0.

        >>> goyal = ScheduleConfig(warmup_epochs=5, milestones=(30, 60, 80))
        >>> [round(goyal.factor(epoch, 1, 90), 6) for epoch in (0, 4, 5, 29, 30, 60, 80)]
        [0.2, 1.0, 1.0, 1.0, 0.1, 0.01, 0.001]
        """
        warmup = self.warmup_epochs * steps_per_epoch
        if step + 1 < warmup:
            return self.warmup_from + (1 - self.warmup_from) * (step + 1) / warmup
        if self.name == "steps":
            return self.gamma ** sum(step >= epoch * steps_per_epoch for epoch in self.milestones)
        if self.name == "cosine":
            # The last step of the rise is at the full rate, though it comes before the warm-up's end.
            done = min(1.0, max(0.0, step - warmup) / max(1.0, epochs * steps_per_epoch - warmup))
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        return 1.0
