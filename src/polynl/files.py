"""Reading and writing files: written completely or not at all, with errors that name the file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from polynl.errors import SettingsError


def write_atomically(path: Path, content: str | bytes | memoryview, *, durable: bool = True) -> None:
    """Write to a temporary file in the same folder, flush it to disk, and rename it.

    Without `durable`, a power failure may lose the file: for thousands of small files that are slow to flush.
    An OSError names the file. A link stays a link, and a device or a pipe what it is.
    """
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            # In some locales a file name's bytes are kept as surrogates; here they are bytes again.
            file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk gives no name, other errors the temporary one
            raise type(error)(error.errno, error.strerror or str(error), os.fspath(path)) from error
        raise
    if durable:
        _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Without this, a power failure may undo the rename; not every system can open folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def output_folder(path: Path) -> Iterator[None]:
    """Create the folder of --out; at the end, remove what was created if it holds no file.

    A SettingsError says why it cannot be created.
    """
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise SettingsError(f"--out: {path} is a file; expected a folder.") from None
    except OSError as error:
        raise SettingsError(f"--out: {path} cannot be written to: {error.strerror}.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # one that is not empty, and so are those that contain it
            for folder in created:
                folder.rmdir()


@contextmanager
def temporary_folder(name: str, parent: Path) -> Iterator[Path]:
    """A hidden folder of that name and some letters, deleted at the end.

    A process that is killed cannot delete its own; the next one with this name and parent does.
    """
    with ExitStack() as locks:
        with ExitStack() as meanwhile:
            # So that nobody takes a folder for an abandoned one before it is locked.
            _lock(parent, meanwhile, wait=True)
            for abandoned in parent.glob(f".{name}-*.tmp"):
                with ExitStack() as lock:
                    if _lock(abandoned, lock):
                        shutil.rmtree(abandoned, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".tmp", dir=parent))
            _lock(folder, locks)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, held: ExitStack, *, wait: bool = False) -> bool:
    """Lock a folder until `held` is closed or the process dies; whether that was possible."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):  # Windows; another process has it, or the file system has no locks
        return False
    return True


def read_json(path: Path) -> Any:
    """The content of a JSON file; a SettingsError says where it is invalid."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        what = f"{error.msg.removesuffix(' at')} at {place}"
        raise SettingsError(f"{path} is not valid JSON, or is truncated: {what}.") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not valid JSON: {error}.") from None


def check_destination(path: Path, kind: str, option: str) -> None:
    """Raise a SettingsError if the file or new folder cannot be written, before there is work to lose."""
    if path.exists() and path.is_dir() != (kind == "folder"):
        other = "folder" if kind == "file" else "file"
        raise SettingsError(f"{option}: {path} is a {other}; expected a {kind}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = next(path.iterdir(), None) if path.is_dir() else None
    except OSError as error:
        raise SettingsError(f"{option}: {path} cannot be written: {error.strerror}.") from None
    is_device = path.exists() and not path.is_file() and not path.is_dir()
    if not is_device and not os.access(path.resolve().parent, os.W_OK):
        raise SettingsError(f"{option}: {path} cannot be written: its folder is read-only.")
    # Files of another model or of other images would be scored as if they were this one's.
    if there is not None:
        raise SettingsError(f"{option}: {path} already contains {there.name}; choose a new or empty folder.")
