"""Commands that list what comes with polynl."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from polynl.errors import SettingsError


@dataclass(frozen=True)
class Blocks:
    """List the blocks: what they cost, and their options with the defaults.

    Multiply-adds and parameters are counted for one map; nothing is computed.
    """

    channels: int = 256
    """Channels of the map."""
    side: int = 56
    """Height and width of the map."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.catalogue.blocks_table` and `options_table`."""
        from polynl.catalogue import blocks_table, options_table

        for name in ("channels", "side"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name}: {getattr(self, name)} must be at least 1.")
        console.print(blocks_table(self.channels, self.side))
        console.print()
        console.print(options_table())


@dataclass(frozen=True)
class Recipes:
    """List the recipes that come with polynl."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.catalogue.recipes_table`."""
        from polynl.catalogue import recipes_table

        console.print(recipes_table())
