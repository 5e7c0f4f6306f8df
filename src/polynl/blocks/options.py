"""Checks of the options of blocks: each returns the value, or raises a ValueError that names it."""

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeVar, get_args

T = TypeVar("T")


def positive(name: str, value: int) -> int:
    """`value`, if it is a positive integer, Python's or NumPy's."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value <= 0:
        raise ValueError(f"{name}={value!r}: expected a whole number above 0")
    return operator.index(value)


def not_negative(name: str, value: int) -> int:
    """`value`, if it is an integer and not negative."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value < 0:
        raise ValueError(f"{name}={value!r}: expected a whole number, 0 or above")
    return operator.index(value)


def flag(name: str, value: bool) -> bool:
    """`value`, if it is True or False."""
    return choice(name, value, (True, False))


def choice(name: str, value: T, choices: Any) -> T:
    """`value`, if it is one of `choices`, a Literal or an iterable; 1.0 and True are not 1."""
    choices = get_args(choices) or tuple(choices)
    if not any(type(value) is type(option) and value == option for option in choices):
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    return value


def sizes(name: str, value: int | Sequence[int], expected: str, most: float = math.inf) -> tuple[int, ...]:
    """A tuple of `value`, if it is a positive integer or a sequence of up to `most`."""
    if isinstance(value, SupportsIndex):
        return (positive(name, value),)
    if isinstance(value, str) or not isinstance(value, Sequence) or not 0 < len(value) <= most:
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return tuple(positive(name, size) for size in value)


def divides(name: str, value: int, whole_name: str, whole: int) -> int:
    """`value`, if it divides `whole`."""
    if whole % positive(name, value):
        raise ValueError(f"{name}={value!r}: expected a divisor of {whole_name}={whole}")
    return value


def width(name: str, value: int | None, default: int) -> int:
    """A number of channels: `value`, or `default` (at least 1) if it is None."""
    return max(1, default) if value is None else positive(name, value)


def residual_flag(value: bool, init: str) -> bool:
    """`value` of the option `residual`, if the block can start with `init`."""
    if not flag("residual", value) and init == "identity":
        raise ValueError(
            "residual=False: expected True with init='identity', since nothing is added to the input; "
            "use init='random'"
        )
    return value
