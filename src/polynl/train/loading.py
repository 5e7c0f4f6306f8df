"""Batches of images, read in this process or in others, which end with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from polynl.tasks.base import Batch
from polynl.train.interruption import ignore_signals


class Reader:
    """Reads the batches that keys name; its workers, slow to start, live until `close`."""

    def __init__(
        self,
        data: Any,
        collate: Callable[[Sequence[Any]], Batch],
        *,
        workers: int,
        device: torch.device,
    ) -> None:
        self._keys = _Keys()
        self._loader = DataLoader(
            cast(Dataset[Any], data),
            batch_sampler=self._keys,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=ignore_signals,
            pin_memory=device.type == "cuda",
            # Its own, or the seeds it draws for its workers would shift the random numbers of dropout.
            generator=torch.Generator(),
        )

    def batches(self, keys: Iterable[list[Any]]) -> Iterator[Batch]:
        """A batch for each sequence of keys."""
        self._keys.batches = keys
        return iter(self._loader)

    def close(self) -> None:
        """End the workers: Python would do it by a signal, which they ignore, and wait for them for ever."""
        iterator = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


class _Keys(Sampler[list[Any]]):
    """What a DataLoader, which has one sampler for good, is given anew for every epoch."""

    def __init__(self) -> None:
        self.batches: Iterable[list[Any]] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)
