"""Folders that are there while a command runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from polynl.errors import SettingsError
from polynl.files import output_folder, temporary_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from polynl.files import temporary_folder
with temporary_folder("kept", Path(sys.argv[1])) as folder:
    (folder / "tile").write_text("features")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_temporary_folder_is_deleted_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), temporary_folder("kept", tmp_path) as folder:
        folder.mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_deleted_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    with temporary_folder("other", tmp_path):
        assert left.exists()
    with temporary_folder("kept", tmp_path) as first:
        assert [*tmp_path.iterdir()] == [first]
        with temporary_folder("kept", tmp_path) as second:
            assert {*tmp_path.iterdir()} == {first, second}
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_without_files_is_removed_again(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with pytest.raises(KeyError), output_folder(out):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with output_folder(out):
        (out / "file").touch()
    assert (out / "file").exists()
    (tmp_path / "empty").mkdir()
    with output_folder(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").exists()  # it was there before
    with pytest.raises(SettingsError, match="is a file; expected a folder"), output_folder(out / "file"):
        pass
