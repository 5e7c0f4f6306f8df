"""What a machine does to a run: memory or files run out, or a process of the run is killed."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from polynl.errors import RunStoppedError, is_out_of_files, is_out_of_memory, open_files_remedy
from polynl.train.config import Recipe
from polynl.train.loading import Reader
from polynl.train.processes import Processes, StopRequest, wait_until

NO_CHECKPOINT = "There is no checkpoint yet."


@dataclass(frozen=True)
class Failure:
    """What happened, and what to do about it."""

    what: str
    remedy: str


@contextmanager
def failures_explained(
    recipe: Recipe,
    processes: Processes,
    readers: Sequence[Reader],
    *,
    kept: Callable[[], str] = lambda: "",
    stop: StopRequest | None = None,
) -> Iterator[None]:
    """Turn a failure of the machine into a RunStoppedError; other errors keep their traceback.

    `kept` says what a training has saved so far; an evaluation has nothing to continue.
    """
    try:
        yield
    except BaseException as error:
        for reader in readers:  # of which more may die while this is handled
            reader.ignore_deaths()
        if not isinstance(error, Exception):
            raise
        saved = kept()
        lost = processes.lost(error)
        if lost is not None:
            then = "torchrun restarts the run" if processes.will_restart else "Continue with --resume"
            processes.leave(RunStoppedError(f"{lost}. {saved} {then}." if saved else f"{lost}."), stop)
        failure = find_failure(error, readers, recipe, saved=saved)
        if failure is None:
            raise
        remedy = failure.remedy
        then = f"{saved} To continue, {remedy} and add --resume." if saved else f"{remedy.capitalize()}."
        raise RunStoppedError(f"{failure.what}. {then}") from error
    finally:
        for reader in readers:
            reader.close(kill=True)


def find_failure(error: Exception, readers: Sequence[Reader], recipe: Recipe, saved: str) -> Failure | None:
    """The machine's failure behind an error; None if the program is to blame."""

    def exit_codes() -> list[int]:
        return [code for reader in readers for code in reader.exit_codes()]

    if isinstance(error, ConnectionError | EOFError):  # which break a moment before a worker is gone
        wait_until(lambda: bool(exit_codes()), 1.0)
    codes = exit_codes()
    if is_out_of_files(error) or errno.EMFILE in codes:
        return Failure("too many files are open", open_files_remedy())
    if is_out_of_memory(error) or errno.ENOMEM in codes:
        return Failure("out of memory", _less_memory(recipe, saved))
    killed = [-code for code in codes if code < 0]
    if not killed:
        return None
    what = f"a data loading worker was killed by {signal.Signals(killed[0]).name}"
    if killed[0] == signal.SIGKILL:
        return Failure(f"{what}, probably because memory ran out", _less_memory(recipe, saved))
    if killed[0] == signal.SIGBUS:
        return Failure(f"{what}, probably because /dev/shm is full", "enlarge it or lower workers")
    return Failure(what, "set workers to 0, which loads images without them,")


def _less_memory(recipe: Recipe, saved: str) -> str:
    """The keys to lower; a run that has a checkpoint cannot change its batch."""
    batch = "batch" if recipe.batch_per_process is None else "batch_per_process"
    keys = [batch] * (saved == NO_CHECKPOINT) + ["workers"] * (recipe.workers > 0) + ["val_batch"]
    note = f" (a lower {batch} needs a new run)" if saved not in ("", NO_CHECKPOINT) else ""
    return f"lower {' or '.join(keys)}{note}"
