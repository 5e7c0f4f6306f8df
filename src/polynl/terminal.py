"""What a shell expects of a command: it ends on signals, and prints to any terminal and any pipe.

`polynl.__main__` sets this up before it imports anything that takes long, so this module imports little.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn, TextIO

# For terminals without these characters, where Unicode has no plain form of them itself.
PLAIN = str.maketrans(
    {"×": "x", "÷": "/", "−": "-", "–": "-", "—": "-", "→": "->", "←": "<-", "≤": "<=", "≥": ">="}
    | {"±": "+/-", "µ": "u", "α": "alpha", "β": "beta"}
)
IMPORTING = "<frozen importlib._bootstrap>"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number
        self.message = (
            "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        )


def end_on_signals() -> None:
    """From now on, SIGINT and SIGTERM end the process without a traceback; a second one ends it at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Signals ignored because of `nohup` or a shell stay ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


class CleaningUp:
    """While entered, a signal raises `Interrupted`, so that what is running can clean up."""

    entered = False

    def __enter__(self) -> None:
        CleaningUp.entered = True

    def __exit__(self, *error: object) -> None:
        CleaningUp.entered = False


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    interrupted = Interrupted(number)
    # A module that is interrupted while it is imported may turn the exception into another, or drop it.
    if CleaningUp.entered and not _is_importing(frame):
        raise interrupted
    _leave(interrupted)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _leave(interrupted: Interrupted) -> NoReturn:
    # Not through sys.stderr, which may be what was interrupted.
    os.write(2, f"polynl: {interrupted.message}.\n".encode())
    os._exit(interrupted.exit_code)


def run_to_the_end(command: Callable[[], None]) -> None:
    """Run a command; as one of torchrun's processes, end without Python's shutdown.

    Threads of gloo may still hold tensors. One that drops its last tensor during the shutdown calls abort(),
    and torchrun takes a finished process for a failed one.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return command()
    code: object = None
    try:
        command()
    except SystemExit as ended:
        code = ended.code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def set_up_streams() -> None:
    """Make sure that printing cannot fail because of the encoding, or because nobody reads it any more."""
    codecs.register_error("polynl.plain", _plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as `>&-` does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(getattr(stream, "buffer", None), io.BufferedWriter | io.FileIO):
            setattr(sys, name, _replacement(stream))


def _replacement(stream: io.TextIOWrapper) -> TextIO:
    stream.flush()
    raw = _StandardStream(stream.fileno(), "wb", closefd=False)
    # With PYTHONUNBUFFERED, Python has no buffer either.
    return io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="polynl.plain",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _StandardStream(io.FileIO):
    """Standard output or error; once it cannot be written, what is printed goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                name = {1: "standard output", 2: "standard error"}.get(self.fileno())
                raise OSError(error.errno, error.strerror, name) from None
        return memoryview(data).nbytes


def _plain(error: UnicodeError) -> tuple[str, int]:
    """The characters that cannot be encoded, in ASCII as far as they have such a form."""
    import unicodedata

    assert isinstance(error, UnicodeEncodeError)
    text = unicodedata.normalize("NFKD", error.object[error.start : error.end].translate(PLAIN))
    letters = "".join(letter for letter in text if not unicodedata.combining(letter))
    return letters.encode("ascii", "replace").decode("ascii"), error.end
