"""Measures what the blocks of a model do, on a few validation images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polynl.blocks.base import Block
from polynl.insertion.hooks import HOOKS
from polynl.tasks.base import Batch, Task
from polynl.train.config import Recipe

# The same images after every epoch, so that the figures can be compared.
IMAGES = 16


class BlockWatch:
    """The blocks of a model, and the images on which they are measured."""

    def __init__(self, task: Task, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self._task, self._model, self._recipe, self._device = task, model, recipe, device
        self._blocks = {name_of(name): m for name, m in model.named_modules() if isinstance(m, Block)}
        self._batches: list[Batch] = []

    def figures(self) -> dict[str, float]:
        """α and β, where they are learned, and the share ‖βY‖ ÷ ‖Z‖ of the branch of every block.

        In float32, whatever the recipe says: what bfloat16 rounds off Z is more than an idle branch adds.
        """
        if not self._blocks:
            return {}
        self._batches = self._batches or list(self._images())
        norms: dict[str, list[Tensor]] = {}
        self._model.eval()
        with torch.no_grad(), self._measured(norms):
            for batch in filter(len, self._batches):
                self._task.scorer().update(self._model, batch)
        return {
            name: value
            for block in self._blocks
            for name, value in [*self._scales(block), *_share(block, norms.get(block))]
        }

    def _images(self) -> Iterator[Batch]:
        """Batches of images that are spread over the validation set."""
        data = self._task.val_set()
        count, size = min(IMAGES, len(data)), self._recipe.scoring_batch(1)
        samples = [data[number * len(data) // count] for number in range(count)]
        for first in range(0, count, size):
            batch = self._task.collate(samples[first : first + size], training=False)
            yield batch.to(self._device, channels_last=self._recipe.channels_last)

    @contextmanager
    def _measured(self, norms: dict[str, list[Tensor]]) -> Iterator[None]:
        handles = [
            block.register_forward_hook(partial(_add_norms, norms.setdefault(name, [])))
            for name, block in self._blocks.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _scales(self, name: str) -> Iterator[tuple[str, float]]:
        for figure, value in zip(("alpha", "beta"), self._blocks[name].scales(), strict=True):
            if isinstance(value, Tensor):
                yield f"{name}.{figure}", value.item()


def name_of(module: str) -> str:
    """The place of a block, without the name that `insert` gave it."""
    place, _, own = module.rpartition(".")
    return place if own in HOOKS else module


def _add_norms(squares: list[Tensor], block: Block, inputs: tuple[Any, ...], z: Tensor) -> None:
    """A forward hook: add ‖Z − αX‖² and ‖Z‖²."""
    x, alpha = inputs[0], block.scales()[0]
    branch = z.float() - alpha * x.float()
    squares.append(torch.stack([branch.square().sum(), z.float().square().sum()]))


def _share(name: str, squares: list[Tensor] | None) -> Iterator[tuple[str, float]]:
    """The share of a block over all its calls."""
    if squares:
        branch, whole = torch.stack(squares).sum(0).sqrt().tolist()
        yield f"{name}.share", branch / whole if whole > 0 else 0.0
