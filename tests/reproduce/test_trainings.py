"""The news of trainings in processes of their own: in order, to the end, and never waited for in vain."""

import multiprocessing
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from polynl.errors import RunStoppedError
from polynl.reproduce.trainings import _News, _Reporter, _Running, _show


@pytest.fixture
def progress() -> Progress:
    return Progress(console=Console(quiet=True))


def piped(progress: Progress) -> tuple[Any, _Running]:
    """Where a training reports, and what the process that shows it reads."""
    news, sender = multiprocessing.Pipe(duplex=False)
    return sender, _Running(None, news, progress.add_task("a training", text="waiting"))


def test_the_last_news_is_shown_after_a_process_has_ended(progress: Progress) -> None:
    sender, running = piped(progress)
    reporter = _Reporter(sender)
    reporter.begin(5, 0)
    for done in range(1, 4):
        reporter.step(done, f"step {done}")
    sender.close()
    _show([running], progress, seconds=60)
    (bar,) = progress.tasks
    assert (bar.completed, bar.total, bar.fields["text"]) == (3, 5, "step 3")


@pytest.mark.parametrize(
    ("done", "said"),
    [(0, "it broke."), (3, "it broke.\nThe other trainings are kept; continue them with --resume.")],
)
def test_the_first_failure_stops_whatever_the_others_do(done: int, said: str, progress: Progress) -> None:
    (quiet, waiting), (sender, failing) = piped(progress), piped(progress)
    quiet.send(_News(done, 5))
    _show([waiting], progress, seconds=60) if done else None
    sender.send(_News(1, 5))
    sender.send(_News(failure="it broke."))
    with pytest.raises(RunStoppedError) as stopped:
        _show([failing], progress, seconds=60)
    assert str(stopped.value) == said
    quiet.close()


def test_a_training_to_which_nobody_listens_is_not_held_up(progress: Progress) -> None:
    """Its pipe would be full, and a training that is being stopped would wait for ever."""
    sender, running = piped(progress)
    running.news.close()
    reporter = _Reporter(sender)
    for step in range(10_000):
        reporter.step(step, "a text that fills the pipe")
