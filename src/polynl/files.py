"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from polynl.errors import SettingsError


def write_atomically(path: Path, content: str | bytes | memoryview, *, durable: bool = True) -> None:
    """Write to a temporary file in the same folder, flush it to the disk, and give it the name.

    Without `durable` a power cut may lose it: for thousands of small files, which would take long to flush.
    An OSError names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # of a full disk it has no name, of another the temporary one
            raise type(error)(error.errno, error.strerror or str(error), os.fspath(path)) from error
        raise
    if durable:
        _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Without this a power cut may forget the new name; not every system opens folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make the folder of --out, or raise a SettingsError that says why there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise SettingsError(f"--out: {path} is a file; the pictures need a folder.") from None
    except OSError as error:
        raise SettingsError(f"--out: {path} cannot be written to: {error.strerror}.") from None


def read_json(path: Path) -> Any:
    """The content of a file, or a SettingsError that says where it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        what = f"{error.msg.removesuffix(' at')} at {place}"
        raise SettingsError(f"{path} is no JSON, or not all of it: {what}.") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is no JSON: {error}.") from None


def check_destination(path: Path, kind: str, option: str) -> None:
    """Raise a SettingsError where no such file or new folder can be written, before there is work to lose."""
    if path.exists() and path.is_dir() != (kind == "folder"):
        other = "folder" if kind == "file" else "file"
        raise SettingsError(f"{option}: {path} is a {other}; give the name of a {kind}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = next(path.iterdir(), None) if path.is_dir() else None
    except OSError as error:
        raise SettingsError(f"{option}: {path} cannot be written: {error.strerror}.") from None
    # What another model has found in other images would be scored as if it were of this one.
    if there is not None:
        raise SettingsError(f"{option}: {path} already has {there.name} in it; give a new or empty folder.")
