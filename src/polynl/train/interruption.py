"""Signals that end a run: noted when they come, acted upon between two steps."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

# The last one comes when a terminal is closed; Windows has none.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
# Whoever passes a signal on, as `timeout` does, lets it come twice at once; people take longer.
AGAIN = 1.0


class Interruption:
    """While entered, the first signal is noted in `signal`; one that comes later ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._noted_at = 0.0
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run is to end; also where torchrun, which would restart it, was killed."""
        return self.signal is not None or (self._parent is not None and os.getppid() != self._parent)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at >= AGAIN:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            # What `nohup` or a shell has told the process to ignore stays ignored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._note)
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
