"""Loading data: which images each process reads, in which order, and in which batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler

from polynl.tasks.base import Batch, Images
from polynl.train.workers import Loader, set_up_worker


class Reader:
    """Loads batches by the keys of their samples; its workers, slow to start, run until `close`."""

    def __init__(
        self,
        data: Any,
        collate: Callable[[Sequence[Any]], Batch],
        *,
        workers: int,
        device: torch.device,
    ) -> None:
        self._sampler = _ReplaceableSampler()
        self._loader = Loader(
            cast(Dataset[Any], data),
            batch_sampler=self._sampler,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=set_up_worker,
            pin_memory=device.type == "cuda",
            # With the global generator, drawing seeds for workers would shift the random numbers of dropout.
            generator=torch.Generator(),
        )

    def batches(self, keys: Iterable[list[Any]]) -> Iterator[Batch]:
        """One batch for each list of keys."""
        self._sampler.batches = keys
        return iter(self._loader)

    def exit_codes(self) -> list[int]:
        """The exit codes of the workers that have ended; negative ones are signals."""
        return self._loader.exit_codes()

    def ignore_deaths(self) -> None:
        """From now on, the death of a worker is not raised as an error wherever the program happens to be."""
        self._loader.ignore_deaths()

    def close(self, *, kill: bool = False) -> None:
        """Stop the workers; with `kill`, do not wait until they have finished what they are loading."""
        self._loader.close(kill=kill)


class _ReplaceableSampler(Sampler[list[Any]]):
    """A sampler whose batches are replaced every epoch: a DataLoader keeps its sampler for life."""

    def __init__(self) -> None:
        self.batches: Iterable[list[Any]] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)


Key = tuple[int, int]


class TrainSampler(Sampler[list[Key]]):
    """The batches of one process in one epoch, starting at `first_step`, as keys (epoch, index).

    Every epoch has its own random order, which is cut into batches; every process takes an equal share of
    each batch. Images left over after the last full batch are dropped for the epoch.

    With `groups`, one number per image, a batch holds images of a single group as far as they fill batches;
    the rest of all groups is batched in the order of the groups' numbers.
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
                raise ValueError(
                    f"groups: expected one number for each of {length} images, got {len(groups)}."
                )
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
    """The images in the full batches of `order`, batched again by group, with the batches shuffled."""
    order = order[: len(order) // batch * batch]
    order = order[groups[order].argsort(stable=True)]
    _, group, sizes = groups[order].unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[group]
    fills = place < (sizes // batch * batch)[group]
    batches = torch.cat([order[fills], order[~fills]]).view(-1, batch)
    return batches[torch.randperm(len(batches), generator=generator)].flatten()


def eval_batches(length: int, *, batch: int, rank: int, processes: int) -> BatchSampler:
    """The batches of one process in evaluation: every image once, so shares may differ by one image."""
    return BatchSampler(range(rank, length, processes), batch, drop_last=False)


class SeededDataset(Dataset[Any]):
    """A data set indexed by (epoch, index), whose augmentation depends only on that key and the seed."""

    def __init__(self, dataset: Images, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(hash_seed(self._seed, epoch, index))
            return self._dataset[index]


def hash_seed(*numbers: int) -> int:
    """One seed from several numbers; changing any of them gives an unrelated seed.

    >>> hash_seed(0, 1) == hash_seed(1, 0)
    False
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
