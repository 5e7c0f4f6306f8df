"""Top-1 and Top-5 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from polynl.tasks.base import Batch


class TopK:
    """The percentage of images whose class is among the k with the highest logits.

    `logits` maps a model and uint8 images to logits.
    """

    def __init__(self, logits: Callable[[nn.Module, Tensor], Tensor], classes: int) -> None:
        self._logits = logits
        self._images = 0
        self._right = {k: 0 for k in (1, 5) if k <= classes}

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Count the correct images of a batch."""
        logits = self._logits(model, batch.images).float()
        self._images += len(batch)
        for k in self._right:
            found = logits.topk(k).indices == batch.targets[:, None]
            self._right[k] += int(found.any(dim=1).sum())

    def share(self) -> tuple[int, dict[int, int]]:
        """The number of images, and of correct ones for each k."""
        return self._images, self._right

    def compute(self, shares: Sequence[tuple[int, dict[int, int]]]) -> dict[str, float]:
        """Add up the counts, so that shares of any size give the result of one process."""
        images = sum(share for share, _ in shares)
        return {f"top{k}": 100 * sum(right[k] for _, right in shares) / images for k in self._right}
