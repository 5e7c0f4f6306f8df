"""Totals of an epoch, and how a run displays its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from polynl.results.formats import digits, duration, plural
from polynl.train.processes import Processes


@dataclass
class Totals:
    """Losses summed over images, and counts; of one process or of all."""

    losses: dict[str, float] = field(default_factory=dict)
    images: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / max(self.seconds, 1e-9)

    def add(self, other: Totals) -> None:
        """Add the totals of a step or of another process."""
        for name, loss in other.losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + loss
        self.images += other.images
        self.skipped += other.skipped
        self.seconds += other.seconds

    def losses_per_image(self) -> dict[str, float]:
        """The loss and, if it has several terms, each of them."""
        terms = {name: total / max(self.images, 1) for name, total in self.losses.items()}
        return {"loss": sum(terms.values()), **(terms if len(terms) > 1 else {})}

    def reduced(self, processes: Processes) -> Totals:
        """The totals over all processes; seconds are averaged, since they run in parallel."""
        sums = processes.sums(self.images, self.skipped, self.seconds, *self.losses.values())
        images, skipped, seconds, *losses = sums
        named = dict(zip(self.losses, losses, strict=True))
        return Totals(named, round(images), round(skipped), seconds / processes.count)


# Left out of the final table; metrics.csv has them.
BOOKKEEPING = ("step", "images", "seconds", "images_per_second", "skipped")


class Display:
    """A progress bar over the steps of a run and a line per epoch; without a console, nothing."""

    def __init__(self, console: Console | None) -> None:
        self._console = Console(quiet=True) if console is None else console
        self._progress = Progress(
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=self._console.quiet or not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("")

    def begin(self, steps: int, done: int) -> None:
        """Show the bar, if this is a terminal."""
        self._progress.reset(self._bar, total=steps, completed=done)
        self._progress.start()

    def end(self) -> None:
        """Remove the bar."""
        if not self._progress.disable:
            self._progress.stop()

    def step(self, done: int, text: str) -> None:
        """Move the bar and set its text."""
        self._progress.update(self._bar, completed=done, description=escape(text))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)


def epoch_line(row: Mapping[str, Any], epochs: int, scores: Sequence[str]) -> str:
    """The figures of an epoch on one line."""
    parts = [f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", f"loss {row['loss']:.4f}"]
    parts += [f"{name} {row[name]:.2f}" for name in scores]
    parts += [f"lr {row['lr']:.2g}", f"{digits(row['images_per_second'])} images/s", duration(row["seconds"])]
    if row["skipped"]:
        parts.append(f"{plural(row['skipped'], 'unreadable image')} skipped")
    return "  ".join(parts)


def left_out_note(images: int, batch: int) -> list[str]:
    """A sentence about the images that do not fill a batch, if there are any.

    >>> left_out_note(384, 32), left_out_note(400, 32)
    ([], ['Every epoch trains on 384 of 400 images: 16, others each time, do not fill a batch of 32.'])
    """
    left_out = images % batch
    used = f"{images - left_out:,} of {images:,} images"
    text = f"Every epoch trains on {used}: {left_out}, others each time, do not fill a batch of {batch}."
    return [text] if left_out else []


def summary(rows: Sequence[Mapping[str, Any]], best_by: str) -> Table:
    """A table of the first, the best and the last epoch, which shows how far scores and blocks have moved."""
    scored = [row for row in rows if best_by in row]
    first, best, last = scored[0], max(scored, key=lambda row: row[best_by]), scored[-1]
    trained = duration(sum(row["seconds"] for row in rows))
    columns = [Column(), *(Column(heading, justify="right") for heading in ("first", "best", "last"))]
    title = f"{plural(len(rows), 'epoch')} trained in {trained}"
    table = Table(*columns, title=title)
    for name in last:
        if name not in BOOKKEEPING:
            table.add_row(name, *(f"{row[name]:.4g}" if name in row else "" for row in (first, best, last)))
    return table
