"""Trainings side by side, each in a process of its own, so that every core has one."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from polynl.errors import RunStoppedError
from polynl.train.config import Recipe
from polynl.train.loop import train
from polynl.train.progress import Display


@dataclass(frozen=True)
class Training:
    """One recipe with one seed, and the folder it trains in."""

    block: str
    seed: int
    recipe: Recipe
    folder: Path

    def rows(self) -> list[dict[str, Any]]:
        """The figures of its epochs so far."""
        path = self.folder / "metrics.json"
        return json.loads(path.read_text()) if path.exists() else []

    @property
    def finished(self) -> bool:
        """Whether its last epoch is done."""
        return len(self.rows()) == self.recipe.epochs


@dataclass(frozen=True)
class _News:
    """What a training tells: how far it is, or why it failed."""

    number: int
    done: int = 0
    steps: int = 0
    text: str = ""
    failure: str | None = None


def train_all(trainings: Sequence[Training], jobs: int, console: Console) -> None:
    """Train those that have not finished; when one fails, the others save what they have and stop too."""
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    waiting = [number for number, training in enumerate(trainings) if not training.finished]
    running: dict[int, Any] = {}
    with _progress(console, trainings) as (progress, bars), _sigterm_raises():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number = waiting.pop(0)
                    arguments = (number, trainings[number], news, os.getpid())
                    running[number] = context.Process(target=_train, args=arguments)
                    running[number].start()
                _show(news, progress, bars)
                for number in [n for n, process in running.items() if not process.is_alive()]:
                    _show(news, progress, bars)
                    _ended(trainings[number], running.pop(number).exitcode, progress, bars[number])
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.join()


def _train(number: int, training: Training, news: Any, parent: int) -> None:
    """What the process of a training does."""
    display = _Telling(number, news, parent)
    try:
        train(training.recipe, training.folder, Console(quiet=True), resume=True, display=display)
    except BaseException as error:
        message = str(error) if isinstance(error, ValueError | RuntimeError) else repr(error)
        news.put(_News(number, failure=message))
        raise SystemExit(1) from None


class _Telling(Display):
    """Sends what would be shown to the process that shows it."""

    def __init__(self, number: int, news: Any, parent: int) -> None:
        super().__init__(None)
        self._number, self._news, self._parent, self._steps = number, news, parent, 0

    def begin(self, steps: int, done: int) -> None:
        self._steps = steps

    def step(self, done: int, text: str) -> None:
        if os.getppid() != self._parent:
            raise RunStoppedError("the process that started this training is gone.")
        self._news.put(_News(self._number, done, self._steps, text))


def _show(news: Any, progress: Progress, bars: Sequence[TaskID]) -> None:
    """Take in what has arrived; wait for the first of it."""
    wait = 0.2
    while True:
        try:
            item = news.get(timeout=wait)
        except queue.Empty:
            return
        if item.failure is not None:
            raise RunStoppedError(
                f"{item.failure}\nThe other trainings are kept: --resume goes on with them."
            )
        progress.start_task(bars[item.number])
        progress.update(bars[item.number], completed=item.done, total=item.steps, text=item.text)
        wait = 0.0


def _ended(training: Training, code: int, progress: Progress, bar: TaskID) -> None:
    if code != 0:
        raise RunStoppedError(
            f"the training in {training.folder} ended with code {code}: --resume goes on with it."
        )
    scores = "  ".join(f"{name} {training.rows()[-1][name]:.1f}" for name in ("top1",))
    progress.stop_task(bar)
    progress.update(bar, text=scores)


@contextmanager
def _progress(console: Console, trainings: Sequence[Training]) -> Iterator[tuple[Progress, list[TaskID]]]:
    """A bar for each training; where there is no terminal, a line for each at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield progress, [_bar(progress, training) for training in trainings]


def _bar(progress: Progress, training: Training) -> TaskID:
    name = f"{training.block}, seed {training.seed}"
    done = 1 if training.finished else 0
    return progress.add_task(name, total=1, completed=done, text="kept" if done else "waiting", start=False)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind, so that the trainings are told to stop."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise RunStoppedError("stopped by SIGTERM: --resume goes on.", exit_code=128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
