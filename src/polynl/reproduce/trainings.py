"""Trainings in parallel, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from polynl.errors import RunStoppedError
from polynl.files import read_json
from polynl.results.study import METRICS_WRONG, Training, damage_named, epoch_rows
from polynl.tasks.outcomes import OUTCOMES
from polynl.tasks.registry import task_class
from polynl.train.config import Recipe
from polynl.train.loop import train
from polynl.train.outcomes import find_outcomes
from polynl.train.progress import Display
from polynl.train.recipe_file import parse_recipe
from polynl.train.run_folder import METRICS


def recipe_in(training: Training) -> Recipe:
    """The training's recipe, parsed."""
    return parse_recipe(training.recipe, str(training.folder))


def with_rows(training: Training) -> Training:
    """The training with the scores of the epochs in its folder."""
    path = training.folder / f"{METRICS}.json"
    if not path.exists():
        return replace(training, rows=[])
    content = read_json(path)
    with damage_named(path, METRICS_WRONG, "; delete the folder to train again"):
        return replace(training, rows=epoch_rows(content))


@dataclass(frozen=True)
class _News:
    """A message from a training: its progress, or why it failed."""

    done: int = 0
    steps: int = 0
    text: str = ""
    failure: str | None = None


def train_all(trainings: Sequence[Training], jobs: int, console: Console) -> list[Training]:
    """Run the trainings that have not finished; returns all with their scores.

    If one fails, the others save a checkpoint and stop.
    """
    trainings = [with_rows(training) for training in trainings]
    context = _process_context()
    waiting = [number for number, training in enumerate(trainings) if not training.finished]
    running: dict[int, _Running] = {}
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn()]
    # Without a terminal, they are a line per training at the end.
    with (
        Progress(*columns, TextColumn("{task.fields[text]}"), console=console) as progress,
        _sigterm_raises(),
    ):
        bars = []
        for training in trainings:
            name, done = f"{training.row}, seed {training.seed}", int(training.finished)
            text = "kept" if done else "waiting"
            bars.append(progress.add_task(name, total=1, completed=done, text=text, start=False))
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number = waiting.pop(0)
                    running[number] = _start(context, trainings[number], bars[number])
                _show(running.values(), progress, seconds=0.2)
                for number in [n for n, run in running.items() if not run.process.is_alive()]:
                    ended = running.pop(number)
                    _show([ended], progress, seconds=0)
                    _ended(trainings[number], ended, progress)
        finally:
            for run in running.values():
                run.process.terminate()
                run.news.close()
            for run in running.values():
                run.process.join()
    for training in trainings:
        _add_outcomes(training, console)
    return [with_rows(training) for training in trainings]


def _add_outcomes(training: Training, console: Console) -> None:
    """Score a training of an older version, which has not saved its outcomes."""
    if not (training.folder / OUTCOMES).is_file():
        scored = find_outcomes(training.folder, console)
        scored.outcomes.save(training.folder / OUTCOMES)


@dataclass(frozen=True)
class _Running:
    """A training's process, the pipe that its news comes through, and where they are shown.

    Each has a pipe of its own: a queue for all has a lock, which a process that is stopped may hold for ever.
    """

    process: Any
    news: Any
    bar: TaskID


def _start(context: Any, training: Training, bar: TaskID) -> _Running:
    news, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(training, sender))
    process.start()
    # The pipe ends when the process does.
    sender.close()
    return _Running(process, news, bar)


def _process_context() -> Any:
    """Fork the trainings from a process that has imported all this once: it takes seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _train(training: Training, news: Any) -> None:
    """The body of a training's process."""
    # Its data loading workers start as in any other training, not as this process did, with all its imports.
    multiprocessing.set_start_method(None, force=True)
    display = _Reporter(news)
    try:
        train(recipe_in(training), training.folder, Console(quiet=True), resume=True, display=display)
    except BaseException as error:
        message = str(error) if isinstance(error, ValueError | RuntimeError) else repr(error)
        with suppress(OSError):
            news.send(_News(failure=message))
        raise SystemExit(1) from None


class _Reporter(Display):
    """Sends progress to the process that shows it."""

    def __init__(self, news: Any) -> None:
        super().__init__(None)
        self._news, self._steps = news, 0
        self._parent = multiprocessing.parent_process()

    def begin(self, steps: int, done: int) -> None:
        self._steps = steps

    def step(self, done: int, text: str) -> None:
        if self._parent is not None and not self._parent.is_alive():
            raise RunStoppedError("the process that started this training is gone.")
        # Nobody listens any more to a training that is being stopped.
        with suppress(OSError):
            self._news.send(_News(done, self._steps, text))


def _show(running: Iterable[_Running], progress: Progress, *, seconds: float) -> None:
    """Show all messages that have arrived, after waiting that long for the first."""
    listening: dict[Any, _Running] = {run.news: run for run in running}
    while ready := wait(listening, seconds):
        for run in [listening[news] for news in ready]:
            try:
                item: _News = run.news.recv()
            except (EOFError, OSError):
                del listening[run.news]
                continue
            if item.failure is not None:
                others = any(task.completed for task in progress.tasks if task.id != run.bar)
                kept = "\nThe other trainings are kept; continue them with --resume." if others else ""
                raise RunStoppedError(f"{item.failure}{kept}")
            progress.start_task(run.bar)
            progress.update(run.bar, completed=item.done, total=item.steps, text=item.text)
        seconds = 0


def _ended(training: Training, ended: _Running, progress: Progress) -> None:
    code, bar = ended.process.exitcode, ended.bar
    if code != 0:
        raise RunStoppedError(
            f"the training in {training.folder} ended with code {code}; continue it with --resume."
        )
    task, last = task_class(training.recipe["task"]), with_rows(training).last
    scores = "  ".join(f"{name} {last(name):.1f}" for name in task.headline[:1] if last(name) is not None)
    progress.stop_task(bar)
    progress.update(bar, text=scores)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the trainings are stopped too."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise RunStoppedError("stopped by SIGTERM; continue with --resume.", exit_code=128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
