"""The most probable classes of an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Guess(NamedTuple):
    """A class and its probability."""

    number: int
    name: str
    probability: float

    def __str__(self) -> str:
        return f"{self.name} {100 * self.probability:.1f}%"


def most_probable(logits: Tensor, names: Mapping[int, str], top: int) -> list[Guess]:
    """The `top` most probable classes for the logits of one image, or all if there are fewer."""
    values, classes = logits.float().softmax(0).topk(min(top, len(logits)))
    return [
        Guess(number, names.get(number, f"class {number}"), probability)
        for number, probability in zip(classes.tolist(), values.tolist(), strict=True)
    ]
