"""Which process sees which image when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from polynl.train.sampler import EveryImageOnce, Seeded, ShuffledShare, mixed


def shares(
    length: int, batch: int, processes: int = 1, seed: int = 0, epoch: int = 0, first_step: int = 0
) -> list[list[list[tuple[int, int]]]]:
    """The batches of every process."""
    samplers = [
        ShuffledShare(
            length,
            batch=batch,
            rank=rank,
            processes=processes,
            seed=seed,
            epoch=epoch,
            first_step=first_step,
        )
        for rank in range(processes)
    ]
    found = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(batches) for batches in found]
    return found


def flat(batches: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("processes", [2, 3, 6])
@pytest.mark.parametrize("length", [12, 13, 23, 24, 100])
def test_shares_side_by_side_are_the_batches_of_one_process(length: int, processes: int) -> None:
    (whole,) = shares(length, 12)
    divided = shares(length, 12, processes)
    assert [flat(parts) for parts in zip(*divided, strict=True)] == whole
    assert {len(batch) for batches in divided for batch in batches} == {12 // processes}


@pytest.mark.parametrize(("length", "batch"), [(8, 8), (20, 8), (23, 5), (100, 7), (7, 1)])
def test_an_epoch_has_every_image_at_most_once_and_as_many_as_fill_batches(length: int, batch: int) -> None:
    (batches,) = shares(length, batch, epoch=3)
    keys = flat(batches)
    assert {epoch for epoch, _ in keys} == {3}
    indices = [index for _, index in keys]
    assert len(set(indices)) == len(indices) == length // batch * batch
    assert set(indices) <= set(range(length))


def test_too_few_images_make_no_batch() -> None:
    assert shares(7, 8) == [[]]


def test_what_an_epoch_leaves_out_is_not_always_the_same() -> None:
    left_out = [set(range(11)) - {index for _, index in flat(shares(11, 8, epoch=e)[0])} for e in range(20)]
    assert all(len(rest) == 3 for rest in left_out)
    assert set.union(*left_out) == set(range(11))


def test_orders_differ_between_epochs_and_seeds_and_come_again() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(index for _, index in flat(shares(50, 10, seed=seed, epoch=epoch)[0]))

    orders = {(seed, epoch): order(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(set(orders.values())) == 25
    assert all(order(*key) == found for key, found in orders.items())
    assert list(range(50)) not in map(list, orders.values())


def test_the_order_needs_nothing_of_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = shares(30, 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert shares(30, 5) == first


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("first_step", range(4))
def test_a_later_start_gives_the_rest_of_the_epoch(first_step: int, processes: int) -> None:
    whole, rest = shares(26, 8, processes), shares(26, 8, processes, first_step=first_step)
    assert rest == [batches[first_step:] for batches in whole]


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 100])
@pytest.mark.parametrize("batch", [1, 3, 16, 200])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_scoring_takes_every_image_exactly_once(length: int, batch: int, processes: int) -> None:
    samplers = [
        EveryImageOnce(length, batch=batch, rank=rank, processes=processes) for rank in range(processes)
    ]
    found = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(batches) for batches in found]
    sizes = [len(batch) for batches in found for batch in batches]
    assert all(0 < size <= batch for size in sizes)
    per_process = [sum(len(batch) for batch in batches) for batches in found]
    assert max(per_process) - min(per_process) <= 1
    indices = [index for batches in found for batch in batches for index in batch]
    assert sorted(indices) == list(range(length))


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    """An image that is all augmentation."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4)


def test_augmentation_depends_on_seed_epoch_and_image_and_on_nothing_before_it() -> None:
    data = Seeded(Noise(), 3)
    keys = list(itertools.product(range(3), range(5)))
    first = {key: data[key] for key in keys}
    torch.randn(7)
    assert all(torch.equal(data[key], first[key]) for key in reversed(keys))
    assert len({tuple(noise.tolist()) for noise in first.values()}) == len(keys)
    assert not torch.equal(Seeded(Noise(), 4)[0, 0], first[0, 0])


def test_augmentation_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Seeded(Noise(), 0)[1, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_are_mixed_from_all_their_numbers() -> None:
    numbers = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (10, 1), (1, 1), (0, 0, 0), (-1,), (10**30,)]
    seeds = [mixed(*some) for some in dict.fromkeys(numbers)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
