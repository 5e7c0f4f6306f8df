"""Commands that read the results of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from polynl.commands.options import FILE, Keys


@dataclass(frozen=True)
class Compare:
    """Compare two trained networks: is one better than the other, beyond chance?

    Takes folders of polynl train, scored on the same images, or checkpoints, which are scored now on the
    validation images of their recipes. With keys of the recipe, all are scored now:
      polynl compare runs/a runs/b --data.root DIR
    """

    first: Annotated[Positional[Path], arg(metavar="RUN_A")]
    """Folder of a run, or a checkpoint; both must come first."""
    second: Annotated[Positional[Path], arg(metavar="RUN_B")]
    """What to compare it with."""
    out: Annotated[Path | None, FILE] = None
    """Write the scores, their difference and the intervals to this JSON file."""
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.compare.run.run_compare`."""
        from polynl.compare.run import run_compare

        run_compare(self.first, self.second, self.out, console, self.keys)


@dataclass(frozen=True)
class Report:
    """Write a report of runs: one HTML page, which works offline.

    Takes folders of polynl reproduce, polynl train and polynl bench, in any mix.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR …")]
    """Folders of the runs."""
    out: Annotated[Path, FILE] = Path("report.html")
    """File to write."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.report.run.run_report`."""
        from polynl.report.run import run_report

        run_report(self.runs, self.out, console)
