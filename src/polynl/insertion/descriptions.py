"""Describe a block by what builds it again: its name, channel count and options, in values of JSON."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

from torch import nn

from polynl.blocks.base import Block, options_of
from polynl.blocks.registry import BLOCKS

Description = dict[str, Any]


def description_of(block: Block) -> Description:
    """The name in the registry, or else the import path of the class, and the value of every option."""
    options = [name for name in options_of(type(block)) if name not in ("device", "dtype")]
    if unknown := [name for name in options if not hasattr(block, name)]:
        raise ValueError(f"a {type(block).__name__} does not store its option {unknown[0]!r} under that name")
    # The class that FSDP makes of a block to shard it has no name of its own.
    kind = type(block).__mro__[2] if hasattr(type(block), "_get_fsdp_state") else type(block)
    registered = (name for name, row in BLOCKS.items() if row.block is kind)
    name = next(registered, None)
    return _description(
        _import_path(kind) if name is None else name,
        block.channels,
        {name: getattr(block, name) for name in options},
    )


def description_of_call(
    maker: Callable[..., nn.Module], channels: int, options: Mapping[str, Any]
) -> Description | str:
    """The import path of what was called and the arguments; words if it cannot be described."""
    try:
        return _description(_import_path(maker), channels, options)
    except ValueError as error:
        return str(error)


def _description(name: str, channels: int, options: Mapping[str, Any]) -> Description:
    return {
        "block": name,
        "channels": operator.index(channels),
        "options": {option: _plain(option, value) for option, value in options.items()},
    }


def _import_path(maker: Any) -> str:
    name = getattr(maker, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise ValueError(
            f"{maker!r} made it, which has no name to be found by: insert a class or a function instead"
        )
    return f"{maker.__module__}:{name}"


def _plain(option: str, value: Any) -> Any:
    """The value as JSON gives it back."""
    if isinstance(value, list | tuple):
        return [_plain(option, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(option, item) for key, item in value.items()}
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, SupportsIndex):  # an integer, Python's or NumPy's
        return operator.index(value)
    raise ValueError(
        f"its option {option}={value!r} cannot be written as JSON: "
        "insert a class or a function of your own that sets it"
    )
