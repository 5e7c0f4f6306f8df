"""What is wrong, in words for whoever typed it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


class SettingsError(ValueError):
    """Options, a recipe or files that cannot be run; `hint` says what to change on the command line."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message + hint)
        self.message, self.hint = message, hint


class RunStoppedError(RuntimeError):
    """A run that ended before its end; the message says why, what is kept, and how to go on."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def near_matches(word: str, choices: Iterable[str]) -> str:
    """ " Did you mean …?", or nothing if nothing is near."""
    near = difflib.get_close_matches(word, list(choices), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def shortened(names: Sequence[object], most: int = 3) -> str:
    """All of a few names, or the first and how many there are more.

    >>> shortened("abc"), shortened("abcde")
    ('a, b, c', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def chosen(names: Iterable[str], choices: Sequence[str], kind: str) -> list[str]:
    """`names` without repetition, each one of `choices`."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in choices:
            hint = near_matches(name, choices)
            raise SettingsError(f"no {kind} is called {name!r}.{hint}\nThere are: {', '.join(choices)}.")
    return names


def check_resume_or_overwrite(*, resume: bool, overwrite: bool, kept: str = "the run in --out") -> None:
    """Raise a SettingsError where both are asked for; `kept` is what they are about."""
    if resume and overwrite:
        raise SettingsError(f"--resume keeps {kept} and --overwrite replaces it: give one of them.")


def occupied(path: Path, holds: str = "a run", *, it: str = "it") -> SettingsError:
    """The error where something would be lost; `it` is the word for what the path holds."""
    return SettingsError(
        f"{path} holds {holds} already: go on with {it} by --resume, replace {it} by --overwrite, "
        "or choose another --out."
    )


def begun_otherwise(path: Path, begun_with: str, changed: Iterable[str]) -> SettingsError:
    """The error where a run would go on as another one; `changed` has a line for every difference."""
    lines = "\n".join(f"  {line}" for line in changed)
    return SettingsError(f"{path} was begun with {begun_with}, and one run has one:\n{lines}")
