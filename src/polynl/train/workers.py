"""The processes that load data: one that fails ends, so that the run notices, and none outlives the run."""

from __future__ import annotations

import errno
import multiprocessing.queues
import os
import sys
import traceback
from typing import Any

from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from polynl.errors import is_out_of_files, is_out_of_memory
from polynl.train.processes import ignore_signals


class Loader(DataLoader[Any]):
    """A DataLoader that can say how its workers ended, and kill them."""

    _workers: _Workers | None = None

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return super()._get_iterator() if self.num_workers == 0 else _Workers(self)

    def exit_codes(self) -> list[int]:
        """The exit codes of the workers that have ended by themselves; negative ones are signals."""
        return [] if self._workers is None else self._workers.exit_codes()

    def ignore_deaths(self) -> None:
        """From now on, torch does not raise an error when a worker dies."""
        if self._workers is not None:
            self._workers.ignore_deaths()

    def close(self, *, kill: bool) -> None:
        """Stop the workers. At exit Python would send them a signal, which they ignore, and hang."""
        if self._workers is not None:
            if kill:
                self._workers.kill()
            self._workers._shutdown_workers()
            self._workers.kill()


class _Workers(_MultiProcessingDataLoaderIter):
    """The workers of a loader."""

    _ended: list[int] | None = None

    def __init__(self, loader: Loader) -> None:
        _raise_file_limit()
        loader._workers = self
        try:
            super().__init__(loader)
        except BaseException:
            # The destructor expects that all of them have started.
            self.kill()
            self._shutdown = True
            raise

    def exit_codes(self) -> list[int]:
        if self._ended is not None:
            return self._ended
        return [worker.exitcode for worker in self._workers if worker.exitcode is not None]

    def ignore_deaths(self) -> None:
        if self._worker_pids_set:
            _remove_worker_pids(id(self))
            self._worker_pids_set = False

    def kill(self) -> None:
        self._ended = self.exit_codes()
        self.ignore_deaths()
        for worker in self._workers:
            worker.kill()
            worker.join()


def _raise_file_limit() -> None:
    """Every tensor of every batch that waits to be used is an open file."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def set_up_worker(worker: int) -> None:
    """Called in a worker before it loads anything."""
    ignore_signals()
    # Its threads send what it has loaded. By default they print an error and drop the batch, for which the
    # run would wait forever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined]
    sys.excepthook = lambda kind, error, trace: _end(error)


def _end(error: BaseException, batch: object = None) -> None:
    if is_out_of_files(error):
        os._exit(errno.EMFILE)
    if is_out_of_memory(error):
        os._exit(errno.ENOMEM)
    traceback.print_exception(error)
    os._exit(1)
