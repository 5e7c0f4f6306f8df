"""What a run shows while it goes and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

# What the table at the end leaves to the files.
BOOKKEEPING = ("step", "images", "seconds", "images_per_second", "skipped")


class Display:
    """A bar over the steps of a run, and a line an epoch; without a console, nothing."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def begin(self, steps: int, done: int) -> None:
        """Show the bar, on a terminal."""
        if self._console is None or not self._console.is_terminal:
            return
        eta = TimeRemainingColumn(elapsed_when_finished=True)
        columns = (BarColumn(24), MofNCompleteColumn(), eta, TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._bar = self._progress.add_task("", total=steps, completed=done)
        self._progress.start()

    def end(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()

    def step(self, done: int, text: str) -> None:
        """Where the run is."""
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=done, description=escape(text))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._console is not None:
            self._console.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """A table that stays."""
        if self._console is not None:
            self._console.print(table)


def epoch_line(row: Mapping[str, Any], epochs: int, scores: Sequence[str]) -> str:
    """An epoch in one line."""
    parts = [f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", f"loss {row['loss']:.4f}"]
    parts += [f"{name} {row[name]:.2f}" for name in scores]
    parts += [f"lr {row['lr']:.2g}", f"{row['images_per_second']:.0f} images/s", duration(row["seconds"])]
    if row["skipped"]:
        parts.append(f"{row['skipped']} unreadable images skipped")
    return "  ".join(parts)


def summary(rows: Sequence[Mapping[str, Any]], best_by: str, folder: str) -> Table:
    """The run in a table: its best epoch and its last."""
    scored = [row for row in rows if best_by in row]
    best, last = max(scored, key=lambda row: row[best_by]), scored[-1]
    trained = duration(sum(row["seconds"] for row in rows))
    table = Table(title=f"{len(rows)} epochs trained in {trained}", caption=f"everything is in {folder}")
    table.add_column("")
    for heading in ("best", "last"):
        table.add_column(heading, justify="right")
    for name in last:
        if name not in BOOKKEEPING:
            table.add_row(name, *(f"{row[name]:.4g}" if name in row else "" for row in (best, last)))
    return table


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(75)
    '1 min 15 s'
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
