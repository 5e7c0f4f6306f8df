"""`polynl bench`: measure layers and networks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from polynl.bench.settings import LayerSettings, NetSettings


class BenchLayers(LayerSettings):  # noqa: D101
    __doc__ = LayerSettings.__doc__

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.layers.run_layers`."""
        from polynl.bench.layers import run_layers

        run_layers(self, console)


class BenchNets(NetSettings):  # noqa: D101
    __doc__ = NetSettings.__doc__

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.networks.run_networks`."""
        from polynl.bench.networks import run_networks

        run_networks(self, console)


@dataclass(frozen=True)
class BenchCompare:
    """Compare two runs of `polynl bench layers` or of `polynl bench nets`.

    A change is marked if the interquartile ranges of the two runs do not overlap.
    """

    first: Annotated[Positional[Path], arg(metavar="OLD")]
    """JSON file of the earlier run."""
    second: Annotated[Positional[Path], arg(metavar="NEW")]
    """JSON file of the later run."""
    all: bool = False
    """Show every measurement, not only those that changed."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.compare.run_compare`."""
        from polynl.bench.compare import run_compare

        run_compare(self.first, self.second, console, everything=self.all)
