"""Signals that end a run: noted when they come, acted upon between two steps."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """While entered, SIGTERM and Ctrl-C are noted in `signal`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run is to end; also where torchrun, which would restart it, was killed."""
        return self.signal is not None or (self._parent is not None and os.getppid() != self._parent)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def ignore_signals(worker: int) -> None:
    """What a process that reads images does about signals: it ends when the one that trains does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
