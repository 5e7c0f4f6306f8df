"""What is added up over the steps of an epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polynl.train.processes import Processes


@dataclass
class Totals:
    """Losses summed over images, and counts; of one process, or of all of them together."""

    losses: dict[str, float] = field(default_factory=dict)
    images: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.images / max(self.seconds, 1e-9)

    def add(self, losses: Mapping[str, float], images: int, skipped: int, seconds: float) -> None:
        """Take in a step, whose losses are means over its images."""
        for name, loss in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + loss * images
        self.images += images
        self.skipped += skipped
        self.seconds += seconds

    def losses_per_image(self) -> dict[str, float]:
        """The loss, and where it has several terms, these."""
        terms = {name: total / max(self.images, 1) for name, total in self.losses.items()}
        return {"loss": sum(terms.values()), **(terms if len(terms) > 1 else {})}

    def over(self, processes: Processes) -> Totals:
        """The totals of all processes; they run side by side, so their seconds are not added."""
        sums = processes.sums(self.images, self.skipped, self.seconds, *self.losses.values())
        images, skipped, seconds, *losses = sums
        named = dict(zip(self.losses, losses, strict=True))
        return Totals(named, round(images), round(skipped), seconds / processes.count)

    @classmethod
    def of(cls, shares: Iterable[Mapping[str, Any]]) -> Totals:
        """The sum of totals that `dataclasses.asdict` made."""
        total, losses = cls(), defaultdict[str, float](float)
        for share in shares:
            for name, loss in share["losses"].items():
                losses[name] += loss
            total.images += share["images"]
            total.skipped += share["skipped"]
            total.seconds += share["seconds"]
        total.losses = dict(losses)
        return total
