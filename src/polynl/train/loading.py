"""Which images a process reads when, and the batches made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from polynl.tasks.base import Batch, Images
from polynl.train.processes import ignore_signals


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


Key = tuple[int, int]


class ShuffledShare(Sampler[list[Key]]):
    """The batches of one process in one epoch, from `first_step` on, as keys (epoch, index).

    Every epoch has an order of its own; its batches are cut from it one after the other, and every process
    takes its even share of each batch. The images that fill no batch are left out of the epoch.

    With `groups`, a number for each image, images share batches with those of their own group: as many as
    fill batches. What remains of the groups is put together in the order of their numbers.
    """

    def __init__(
        self,
        length: int,
        *,
        batch: int,
        rank: int,
        processes: int,
        seed: int,
        epoch: int,
        first_step: int = 0,
        groups: Sequence[int] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(hash_seed(seed, epoch))
        self._order = torch.randperm(length, generator=generator)
        if groups is not None:
            if len(groups) != length:
                raise ValueError(f"groups: expected a number for each of {length} images, got {len(groups)}.")
            self._order = _grouped(self._order, torch.as_tensor(groups), batch, generator)
        self._batch, self._share, self._rank = batch, batch // processes, rank
        self._epoch, self._first_step = epoch, first_step

    def __len__(self) -> int:
        return len(self._order) // self._batch - self._first_step

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self._first_step, len(self._order) // self._batch):
            start = step * self._batch + self._rank * self._share
            yield [(self._epoch, index) for index in self._order[start : start + self._share].tolist()]


def _grouped(order: Tensor, groups: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """The images of the whole batches of `order`, cut into batches anew, which come in a random order."""
    order = order[: len(order) // batch * batch]
    order = order[groups[order].argsort(stable=True)]
    _, group, sizes = groups[order].unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[group]
    fills = place < (sizes // batch * batch)[group]
    batches = torch.cat([order[fills], order[~fills]]).view(-1, batch)
    return batches[torch.randperm(len(batches), generator=generator)].flatten()


class EveryImageOnce(Sampler[list[int]]):
    """The batches of one process in scoring: every image once, so the shares may differ by one."""

    def __init__(self, length: int, *, batch: int, rank: int, processes: int) -> None:
        self._indices, self._batch = range(rank, length, processes), batch

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self._indices), self._batch):
            yield list(self._indices[start : start + self._batch])


class Seeded(Dataset[Any]):
    """A data set by keys (epoch, index), whose random augmentation depends on the key and the seed alone."""

    def __init__(self, dataset: Images, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(hash_seed(self._seed, epoch, index))
            return self._dataset[index]


def hash_seed(*numbers: int) -> int:
    """One seed from several numbers: a change in any of them changes all of it.

    >>> hash_seed(0, 1) == hash_seed(1, 0)
    False
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
