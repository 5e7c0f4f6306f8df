"""Means over a window around every position, instead of over the whole map."""

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def windowed_mean(
    x: Float[Tensor, "b n d"],
    spatial: Sequence[int],
    window: Sequence[int],
    weights: Float[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b n d"]:
    """The mean over the positions j with −⌊(w−1)/2⌋ ≤ j − i ≤ ⌊w/2⌋ on every axis, for every position i.

    Those outside of the map do not count, and others as much as their weight; zero where none counts. A
    window w ≥ 2L−1 reaches all of an axis of L positions from everywhere. The sums are taken axis after axis,
    with a cost of N·Σ min(w, 2L−1) additions for each channel.
    """
    counts = x.new_ones(1, x.shape[1]) if weights is None else weights.to(x.dtype)
    weighted = x if weights is None else x * counts.unsqueeze(-1)
    sums, total = (
        _windowed_sum(values.transpose(-2, -1).unflatten(-1, spatial), window)
        for values in (weighted, counts.unsqueeze(-1))
    )
    return (sums / (total + (total == 0))).flatten(2).transpose(-2, -1)


def _windowed_sum(x: Float[Tensor, "b d *spatial"], window: Sequence[int]) -> Float[Tensor, "b d *spatial"]:
    for axis, size in enumerate(window, start=2):
        last = x.shape[axis] - 1
        before, after = min((size - 1) // 2, last), min(size // 2, last)
        if before == after == last:
            x = x.sum(dim=axis, keepdim=True).expand_as(x)
            continue
        # Average pooling works on maps of any rank if the axes around this one are joined.
        rows = x.flatten(0, axis - 1).unsqueeze(1)
        rows = F.pad(rows.flatten(3) if rows.dim() > 3 else rows.unsqueeze(-1), (0, 0, before, after))
        x = F.avg_pool2d(rows, (before + after + 1, 1), stride=1, divisor_override=1).reshape(x.shape)
    return x


# The literal reference: fp64, one sample (n, c), no code shared with the above. Only tests may use it.


def poly_nl_windowed_reference(
    x: Float[Tensor, "n c"],
    w1: Float[Tensor, "c d"],
    w2: Float[Tensor, "c d"],
    w3: Float[Tensor, "d v"],
    spatial: Sequence[int],
    window: Sequence[int],
    w_value: Float[Tensor, "c d"] | None = None,
    weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "n v"]:
    """Y of Eq. 6, with Φ the mean over a window around each position: position by position."""
    x, w1, w2, w3 = (t.double() for t in (x, w1, w2, w3))
    places = list(product(*map(range, spatial)))
    phi = torch.zeros(len(places), w1.shape[1], dtype=torch.float64)
    for i, here in enumerate(places):
        count = 0.0
        for j, there in enumerate(places):
            steps = [b - a for a, b in zip(here, there, strict=True)]
            weight = 1.0 if weights is None else float(weights[j])
            if weight and all(-((w - 1) // 2) <= s <= w // 2 for s, w in zip(steps, window, strict=True)):
                phi[i] += weight * (x[j] @ w1) * (x[j] @ w2)
                count += weight
        phi[i] /= count or 1.0
    values = x if w_value is None else x @ w_value.double()
    return (phi * values) @ w3
