"""Labels of curves are where their curves end, unless that would make them cover each other."""

import itertools
import random

import pytest

from polynl.results.label_places import spread

LOW, HIGH = 0.0, 100.0


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_labels_do_not_overlap_and_keep_their_order(count: int) -> None:
    draw = random.Random(count)
    for _ in range(50):
        wanted = [draw.uniform(-20, 120) for _ in range(count)]
        sizes = [draw.uniform(1, 4) for _ in range(count)]
        places = spread(wanted, sizes, LOW, HIGH)
        order = sorted(range(count), key=lambda k: wanted[k])
        for one, other in itertools.pairwise(order):
            assert places[other] - places[one] >= (sizes[one] + sizes[other]) / 2 - 1e-9
        assert all(y - h / 2 >= LOW - 1e-9 for y, h in zip(places, sizes, strict=True))
        assert all(y + h / 2 <= HIGH + 1e-9 for y, h in zip(places, sizes, strict=True))


def test_labels_stay_where_there_is_room() -> None:
    assert spread([90.0, 10.0, 50.0], [4.0, 4.0, 4.0], LOW, HIGH) == pytest.approx([90.0, 10.0, 50.0])


def test_a_crowd_is_spread_around_its_middle() -> None:
    assert spread([50.0, 50.0, 50.0], [4.0, 4.0, 4.0], LOW, HIGH) == pytest.approx([46.0, 50.0, 54.0])


def test_without_room_for_all_labels_share_what_there_is() -> None:
    places = spread([99.0] * 5, [40.0] * 5, LOW, HIGH)
    assert places == pytest.approx([10.0, 30.0, 50.0, 70.0, 90.0])


def test_nothing_to_place() -> None:
    assert spread([], [], LOW, HIGH) == []
