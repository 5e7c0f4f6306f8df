"""What there is to choose from: the blocks with their options and costs, and the recipes."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from polynl.blocks.registry import BLOCKS, build_block
from polynl.train.recipe_file import BUILT_IN

# Of every block; the docs describe them once.
SHARED = ("channels", "init", "device", "dtype")
CAPTION = (
    "Formulas are for large maps; counts are of what runs: another form on small maps, and from 256 channels "
    "on fewer products for a Gram matrix, which is symmetric."
)


def blocks_table(channels: int, side: int) -> Table:
    """A row per block: its family, the formula of its cost, and counts for one map."""
    title = f"The blocks, counted for one map of {channels} channels and {side} × {side} positions"
    table = Table(
        title=title,
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for heading in ("block", "family", "multiply-adds", "counted", "params"):
        right = heading in ("counted", "params")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for name, entry in BLOCKS.items():
        products, parameters = counted_cost(name, channels, side)
        counts = map(abbreviated, (products, parameters))
        table.add_row(f"[bold]{name}[/]", entry.family, entry.cost, *counts)
    return table


def abbreviated(count: int) -> str:
    """A count in thousands or millions, so that no cost is shown as 0.0 beside larger ones.

    >>> abbreviated(512), abbreviated(8192), abbreviated(376_438_784)
    ('512', '8.2 k', '376.4 M')
    """
    if count < 1000:
        return str(count)
    return f"{count / 1e3:,.1f} k" if count < 1e6 else f"{count / 1e6:,.1f} M"


def options_table() -> Table:
    """A row per block: its options with their defaults."""
    table = Table(title="Their options and defaults", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("block", no_wrap=True)
    table.add_column("options", overflow="fold")
    for name in BLOCKS:
        table.add_row(f"[bold]{name}[/]", escape(_options(name)))
    return table


def counted_cost(name: str, channels: int, side: int) -> tuple[int, int]:
    """The multiply-adds of a block's products for one map (by torch's counter), and its parameters."""
    with torch.device("meta"):
        block, x = build_block(name, channels).eval(), torch.empty(1, channels, side, side)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(x)
    return counter.get_total_flops() // 2, sum(parameter.numel() for parameter in block.parameters())


def _options(name: str) -> str:
    signature = inspect.signature(BLOCKS[name].block).parameters.values()
    shown = [f"{option.name}={option.default!r}" for option in signature if option.name not in SHARED]
    return ", ".join(shown) or "none"


def recipes_table() -> Table:
    """A row per recipe: its name, and what the comment that it begins with calls it."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it trains")
    for path in sorted(BUILT_IN.glob("*.yaml")):
        table.add_row(f"[bold]{path.stem}[/]", escape(description_of(path)))
    return table


def description_of(recipe: Path) -> str:
    """The comment at the top of a recipe, up to the colon after which it goes into detail."""
    first = recipe.read_text("utf-8").partition("\n")[0]
    return first.removeprefix("# ").partition(":")[0].removesuffix(".")
