"""Where the labels of curves go, so that each is near the end of its curve and none covers another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """The middles of labels of these heights, as near as they can be to `wanted` without overlaps.

    They stay between `low` and `high`; where there is not room for all, they overlap evenly. Of all such
    places these have the least sum of squared distances to `wanted`.

    >>> spread([1.0, 5.0, 5.0], [2.0, 2.0, 2.0], 0.0, 10.0)
    [1.0, 4.0, 6.0]
    """
    if not wanted:
        return []
    squeeze = min(1.0, (high - low) / sum(heights))
    heights = [height * squeeze for height in heights]
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    # How far each must be from the first; without that part, they only have to be in order.
    below = [heights[order[0]] / 2]
    for one, other in pairwise(order):
        below.append(below[-1] + (heights[one] + heights[other]) / 2)
    levels = _nearest_in_order([wanted[k] - offset for k, offset in zip(order, below, strict=True)])
    top = high - sum(heights)
    places = dict(
        zip(order, (min(max(v, low), top) + d for v, d in zip(levels, below, strict=True)), strict=True)
    )
    return [places[k] for k in range(len(wanted))]


def _nearest_in_order(values: Sequence[float]) -> list[float]:
    """The values, with neighbours that are out of order replaced by their mean: an isotonic regression."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
