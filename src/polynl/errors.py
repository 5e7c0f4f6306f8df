"""Errors that are shown to the user as a message, without a traceback."""

from __future__ import annotations

import difflib
import errno
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path

_short = reprlib.Repr()
_short.maxstring, _short.maxother, _short.maxlist, _short.maxlevel = 100, 100, 8, 2


class SettingsError(ValueError):
    """Options, a recipe or files that cannot be used; `hint` says what to change on the command line."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message + hint)
        self.message, self.hint = message, hint


class RunStoppedError(RuntimeError):
    """A run that stopped early; the message says why, what is kept, and how to continue."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out: Python's, or the CPU's or the GPU's in PyTorch.

    PyTorch raises a RuntimeError; one from a worker has the text of the original.
    """
    texts = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in texts))
    )


def is_out_of_files(error: BaseException) -> bool:
    """Whether the error says that the process may not open more files."""
    # Without a free descriptor, a process does not get the one that another sends it.
    texts = ("Too many open files", "received 0 items of ancdata")
    return isinstance(error, OSError | RuntimeError) and any(text in str(error) for text in texts)


def open_files_remedy() -> str:
    """What to do if too many files are open."""
    try:
        import resource
    except ImportError:  # Windows
        return "lower workers"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"raise the limit on open files (now {limit}; see ulimit -n) or lower workers"


def near_matches(word: str, choices: Iterable[str]) -> str:
    """ " Did you mean …?", or an empty string if no choice is close."""
    near = difflib.get_close_matches(word, list(choices), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def sentence(text: object) -> str:
    """Text with a mark at its end, such as an error that ends in a question or in none.

    >>> sentence("no such file"), sentence("no such file."), sentence("no block x. Did you mean y?")
    ('no such file.', 'no such file.', 'no block x. Did you mean y?')
    """
    return str(text) if str(text).endswith((".", "?")) else f"{text}."


def shortened(names: Sequence[object], most: int = 3) -> str:
    """The names, or the first few and the number of the others.

    >>> shortened("abc"), shortened("abcde")
    ('a, b, c', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def shown(value: object) -> str:
    """`repr(value)`, shortened if it is long or deeply nested."""
    return _short.repr(value)


def check_choices(names: Iterable[str], choices: Sequence[str], kind: str) -> list[str]:
    """`names` without duplicates; a SettingsError if one is not among `choices`."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in choices:
            hint = near_matches(name, choices)
            raise SettingsError(f"no {kind} is called {name!r}.{hint}\nChoose from: {', '.join(choices)}.")
    return names


def check_resume_or_overwrite(*, resume: bool, overwrite: bool, kept: str = "the run in --out") -> None:
    """Raise a SettingsError if both are given; `kept` names what they refer to."""
    if resume and overwrite:
        raise SettingsError(f"--resume continues {kept}, --overwrite replaces it: choose one of them.")


def existing_run_error(path: Path, contains: str = "a run", *, it: str = "it") -> SettingsError:
    """The error if a path contains something that would be lost; `it` is the pronoun for `contains`."""
    return SettingsError(
        f"{path} already contains {contains}; continue {it} with --resume, replace {it} with --overwrite, "
        "or choose another --out."
    )


def changed_run_error(path: Path, started_with: str, changed: Iterable[str]) -> SettingsError:
    """The error if a run would resume with other settings; `changed` has one line per difference."""
    lines = "\n".join(f"  {line}" for line in changed)
    return SettingsError(
        f"{path} was started with {started_with}; it can only be continued as it was:\n{lines}"
    )
