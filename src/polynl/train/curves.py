"""The curves of a run, for TensorBoard."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Curves:
    """Points that a thread of TensorBoard's writes; where it cannot, the curves end and the run goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._ended = False
        self._hook = threading.excepthook

    def add(self, figures: Mapping[str, float], step: int) -> str | None:
        """A point of each curve; gives what is wrong when they end."""
        if self._ended:
            return None
        try:
            if self._writer is None:
                self._hook, threading.excepthook = threading.excepthook, self._except_hook
                # What a killed run wrote after its last checkpoint comes again, and is hidden by this.
                self._writer = SummaryWriter(str(self._folder), purge_step=step)
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            self._ended = True
            return f"TensorBoard's curves end at step {step}: {error.strerror}."
        return None

    def close(self) -> None:
        """Write out what is not written yet."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
        if threading.excepthook == self._except_hook:
            threading.excepthook = self._hook

    def _except_hook(self, arguments: threading.ExceptHookArgs) -> None:
        """Keep quiet about what `add` gets as well: the thread's traceback would say it first and worse."""
        if not isinstance(arguments.exc_value, OSError):
            self._hook(arguments)
