"""Top-1 and Top-5 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from polynl.tasks.base import Batch
from polynl.tasks.outcomes import Array, Outcomes


class TopK:
    """The percentage of images whose class is among the k with the highest logits.

    `logits` maps a model and uint8 images to logits; `names` are those of the images, by number.
    """

    def __init__(
        self, logits: Callable[[nn.Module, Tensor], Tensor], classes: int, names: Callable[[int], str]
    ) -> None:
        self._logits, self._names = logits, names
        # With few classes, nearly every image is right for k = 5.
        self._ks = [k for k in (1, 5) if k == 1 or 2 * k <= classes]
        self._found: list[Tensor] = []

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Note for the images of a batch their numbers, their classes and for which k they are correct."""
        logits = self._logits(model, batch.images).float()
        targets = batch.targets[:, None]
        right = [(logits.topk(k).indices == targets).any(dim=1) for k in self._ks]
        numbers = torch.tensor(batch.numbers or range(len(batch)))
        self._found.append(
            torch.stack([numbers, *(part.cpu().long() for part in (batch.targets, *right))], 1)
        )

    def share(self) -> Tensor:
        """A row per image: its number, its class and whether it is correct, for each k."""
        return torch.cat([torch.empty(0, 2 + len(self._ks), dtype=torch.long), *self._found])

    def compute(self, shares: Sequence[Tensor]) -> dict[str, float]:
        """The mean over all images, so that shares of any size give the result of one process."""
        self._found = [torch.cat(list(shares))]
        right = self._found[0][:, 2:].sum(0)
        return {
            f"top{k}": 100 * int(count) / len(self._found[0])
            for k, count in zip(self._ks, right, strict=True)
        }

    def outcomes(self) -> Outcomes:
        """For every image its class, and whether it is correct, for each k."""
        rows = self.share().numpy()
        names = np.array([self._names(number) for number in rows[:, 0].tolist()])
        order = np.argsort(names, kind="stable")
        right = {f"top{k}": rows[order, 2 + place].astype(bool) for place, k in enumerate(self._ks)}
        return Outcomes(names[order], rows[order, 1], right)


def score_top_k(outcomes: Outcomes, weights: Array) -> dict[str, Array]:
    """Top-1 and Top-5 of weighted images, for every row of weights."""
    return {
        name: 100 * (weights @ right.astype(float)) / weights.sum(1)
        for name, right in outcomes.arrays.items()
        if name in ("top1", "top5")
    }
