"""Samplers: which process reads which image in which step."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
import torch

from polynl.train.loading import SeededDataset, TrainSampler, eval_batches, hash_seed


def shares(
    length: int,
    batch: int,
    processes: int = 1,
    seed: int = 0,
    epoch: int = 0,
    first_step: int = 0,
    groups: Sequence[int] | None = None,
) -> list[list[list[tuple[int, int]]]]:
    """The batches of every process."""
    samplers = [
        TrainSampler(
            length,
            batch=batch,
            rank=rank,
            processes=processes,
            seed=seed,
            epoch=epoch,
            first_step=first_step,
            groups=groups,
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


# Groups


def grouped(
    groups: Sequence[int], batch: int, epoch: int = 0, processes: int = 1, first_step: int = 0
) -> list[list[int]]:
    """The indices of every batch of all processes together."""
    divided = shares(len(groups), batch, processes, epoch=epoch, first_step=first_step, groups=groups)
    return [[index for _, index in flat(parts)] for parts in zip(*divided, strict=True)]


def flat_indices(batches: Iterable[Iterable[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def random_groups(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices([5, -1, 2, 7], [10, 5, 2, 1], k=length)


def test_no_groups_leave_the_order_as_it_was() -> None:
    keys = flat(shares(12, 5, seed=3, epoch=1, groups=None)[0])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(hash_seed(3, 1)))
    assert [index for _, index in keys] == order[:10].tolist()


def test_groups_that_fill_batches_are_never_mixed() -> None:
    for epoch in range(10):
        batches = grouped([0, 1, 0, 1, 0, 1, 2, 2, 2], 3, epoch)
        assert sorted(map(sorted, batches)) == [[0, 2, 4], [1, 3, 5], [6, 7, 8]]


def test_what_is_left_of_groups_is_mixed_with_its_neighbours() -> None:
    """6 + 5 + 1 + 4 images in batches of 4: of 4 + 4 + 0 + 4 and, left, 2 of group 0, 1 of 1 and 1 of 2."""
    groups = [0] * 6 + [1] * 5 + [2] + [3] * 4
    for epoch in range(10):
        kinds = sorted(sorted(groups[index] for index in batch) for batch in grouped(groups, 4, epoch))
        assert kinds == [[0, 0, 0, 0], [0, 0, 1, 2], [1, 1, 1, 1], [3, 3, 3, 3]]
    # Two images of every group, numbered out of order: neighbours by number share batches of 4.
    groups = [30, 0, 20, 10, 0, 30, 10, 20]
    kinds = sorted(sorted(groups[index] for index in batch) for batch in grouped(groups, 4))
    assert kinds == [[0, 0, 10, 10], [20, 20, 30, 30]]


@pytest.mark.parametrize(("length", "batch"), [(8, 8), (7, 8), (100, 8), (103, 8), (61, 1), (1000, 12)])
def test_groups_change_neither_the_number_of_steps_nor_of_images(length: int, batch: int) -> None:
    groups = random_groups(length, 0)
    for epoch in range(3):
        batches = grouped(groups, batch, epoch)
        assert [len(part) for part in batches] == [batch] * (length // batch)
        assert len(set(flat_indices(batches))) == length // batch * batch


@pytest.mark.parametrize("seed", range(20))
def test_as_few_batches_as_possible_are_mixed(seed: int) -> None:
    groups = random_groups(203, seed)
    batches = grouped(groups, 8)
    taken = Counter(groups[index] for index in flat_indices(batches))
    pure = [batch for batch in batches if len({groups[index] for index in batch}) == 1]
    assert len(pure) == sum(count // 8 for count in taken.values())


def test_what_groups_leave_out_is_what_the_order_leaves_out() -> None:
    groups = random_groups(21, 0)
    rest = set()
    for epoch in range(60):
        left_out = set(range(21)) - set(flat_indices(grouped(groups, 8, epoch)))
        assert left_out == set(range(21)) - {index for _, index in flat(shares(21, 8, epoch=epoch)[0])}
        rest |= left_out
    assert rest == set(range(21))


def test_batches_and_what_they_hold_come_in_random_order() -> None:
    groups = [0] * 40 + [1] * 40
    epochs = [grouped(groups, 8, epoch) for epoch in range(20)]
    kinds = {tuple(groups[batch[0]] for batch in batches) for batches in epochs}
    assert len(kinds) > 15
    together = {tuple(sorted(batch)) for batches in epochs for batch in batches}
    assert len(together) > 190
    assert all(batch != sorted(batch) for batches in epochs for batch in batches[:3])
    # The batch that is mixed is not always the last.
    groups = [0] * 20 + [1] * 20
    places = {
        place
        for epoch in range(50)
        for place, batch in enumerate(grouped(groups, 8, epoch))
        if len({groups[index] for index in batch}) == 2
    }
    assert places == set(range(5))


@pytest.mark.parametrize("processes", [2, 4])
def test_all_processes_share_the_batches_of_groups_and_go_on_with_them(processes: int) -> None:
    groups = random_groups(103, 1)
    whole = grouped(groups, 8, 2)
    assert grouped(groups, 8, 2, processes) == whole
    assert grouped(groups, 8, 2, processes, first_step=5) == whole[5:]
    torch.manual_seed(9)
    assert grouped(groups, 8, 2) == whole
    assert grouped(groups, 8, 3) != whole


def test_groups_are_of_all_images() -> None:
    with pytest.raises(ValueError, match="groups: expected one number for each of 10 images, got 9"):
        shares(10, 2, groups=[0] * 9)


def test_groups_of_all_of_coco() -> None:
    groups = random_groups(118_000, 0)
    share = TrainSampler(118_000, batch=16, rank=0, processes=1, seed=0, epoch=0, groups=groups)
    seen = [index for batch in share for _, index in batch]
    assert len(set(seen)) == len(seen) == 118_000


# Scoring


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 100])
@pytest.mark.parametrize("batch", [1, 3, 16, 200])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_scoring_takes_every_image_exactly_once(length: int, batch: int, processes: int) -> None:
    samplers = [
        eval_batches(length, batch=batch, rank=rank, processes=processes) for rank in range(processes)
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
    """A data set whose images consist of augmentation only."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4)


def test_augmentation_depends_on_seed_epoch_and_image_and_on_nothing_before_it() -> None:
    data = SeededDataset(Noise(), 3)
    keys = list(itertools.product(range(3), range(5)))
    first = {key: data[key] for key in keys}
    torch.randn(7)
    assert all(torch.equal(data[key], first[key]) for key in reversed(keys))
    assert len({tuple(noise.tolist()) for noise in first.values()}) == len(keys)
    assert not torch.equal(SeededDataset(Noise(), 4)[0, 0], first[0, 0])


def test_augmentation_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    SeededDataset(Noise(), 0)[1, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_are_mixed_from_all_their_numbers() -> None:
    numbers = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (10, 1), (1, 1), (0, 0, 0), (-1,), (10**30,)]
    seeds = [hash_seed(*some) for some in dict.fromkeys(numbers)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
