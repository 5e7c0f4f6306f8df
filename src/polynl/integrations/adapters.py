"""Classes that build a block of polynl from the arguments that another library passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polynl.blocks.base import Block
from polynl.blocks.registry import BLOCKS

Build = Callable[..., Block]


def adapters(build: Callable[[type[Block]], Build]) -> dict[str, type]:
    """For every block, by its class's name, a class whose calls return the block itself.

    `build(block)` returns what is called instead. Libraries look for classes, and what is built is a block as
    any other: weights, pickles and `polynl.spec` do not know of the adapter.
    """
    return {row.block.__name__: _adapter(name, row.block, build(row.block)) for name, row in BLOCKS.items()}


def _adapter(name: str, block: type[Block], build: Build) -> type:
    def new(cls: type, *arguments: Any, **options: Any) -> Block:
        return build(*arguments, **options)

    # mmcv names layers after `_abbr_`.
    return type(block.__name__, (), {"__new__": new, "__doc__": block.__doc__, "_abbr_": name})
