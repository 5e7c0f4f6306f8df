"""How a tensor holds a map, and running a block on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Kind = Literal["channels_first", "channels_last", "tokens"]
Grid = tuple[int, ...]
CHOICES = ("auto", *get_args(Kind))


@dataclass(frozen=True)
class Wanted:
    """What is known of a layout before the model runs; None is to be found."""

    kind: Kind | None = None
    prefix_tokens: int | None = None
    grid: Grid | None = None


def wanted(layout: str, prefix_tokens: int | None, grid: Sequence[int] | None) -> Wanted:
    """The options of `insert`, checked. Only tokens have a prefix or a grid."""
    if layout not in CHOICES:
        raise ValueError(f"layout={layout!r}: expected one of {', '.join(CHOICES)}")
    if prefix_tokens is not None and (not _is_count(prefix_tokens) or prefix_tokens < 0):
        raise ValueError(f"prefix_tokens={prefix_tokens!r}: expected a number of tokens, 0 or more")
    if grid is not None and not (
        isinstance(grid, Sequence)
        and 1 <= len(grid) <= 3
        and all(_is_count(size) and size > 0 for size in grid)
    ):
        raise ValueError(f"grid={grid!r}: expected the height and width of the tokens, such as (14, 14)")
    if prefix_tokens is None and grid is None:
        return Wanted(None if layout == "auto" else layout)  # type: ignore[arg-type]
    if layout not in ("auto", "tokens"):
        raise ValueError(f"prefix_tokens and grid are for tokens (b, n, c), and layout={layout!r}")
    return Wanted("tokens", prefix_tokens, None if grid is None else tuple(grid))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Layout:
    """(b, c, *spatial), (b, *spatial, c), or tokens (b, n, c), of which the first are not positions.

    `grid` is the spatial shape of the tokens without the prefix; None if it is not known.
    """

    kind: Kind = "channels_first"
    prefix_tokens: int = 0
    grid: Grid | None = None

    def __str__(self) -> str:
        return {
            "channels_first": "a map (b, c, *spatial)",
            "channels_last": "a map (b, *spatial, c)",
            "tokens": "tokens (b, n, c)",
        }[self.kind]

    def channels(self, shape: torch.Size) -> int:
        """The number of channels of a tensor of this layout."""
        return shape[1 if self.kind == "channels_first" else -1]

    def run(self, block: nn.Module, x: Any) -> Any:
        """The block's output for x, in the layout of x. Prefix tokens stay as they are."""
        if self.kind == "channels_first":
            return block(x)
        if self.kind == "channels_last":
            return block(x.movedim(-1, 1)).movedim(1, -1)
        # Views, and blocks keep memory formats: nothing is copied unless there is a prefix.
        positions = x[:, self.prefix_tokens :] if self.prefix_tokens else x
        spatial = self._spatial(positions, block)
        y = block(positions.transpose(-2, -1).unflatten(2, spatial)).flatten(2).transpose(-2, -1)
        return torch.cat([x[:, : self.prefix_tokens], y], dim=1) if self.prefix_tokens else y

    def _spatial(self, positions: Tensor, block: nn.Module) -> Grid:
        count, blind = positions.shape[1], not uses_grid(block)
        if self.grid is None or (blind and isinstance(positions, torch.fx.Proxy)):
            return (-1,)
        if isinstance(positions, torch.fx.Proxy) or count == math.prod(self.grid):
            return self.grid
        scale = (count / math.prod(self.grid)) ** (1 / len(self.grid))
        scaled = tuple(round(size * scale) for size in self.grid)
        if math.prod(scaled) == count:
            return scaled
        if blind:
            return (-1,)
        raise ValueError(
            f"{type(block).__name__} needs the grid of positions, and {count} tokens do not fit {self.grid} "
            "or a grid of these proportions: remove it with polynl.remove, then insert it with grid="
        )


def uses_grid(block: nn.Module) -> bool:
    """Whether the block's output depends on where positions are; unknown modules may look at it."""
    return bool(getattr(block, "uses_grid", True))
