"""Matlab's files: what SciPy reads in them, or an error, whatever bytes they have."""

from __future__ import annotations

import os
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import cells, content
from scipy.io import loadmat, savemat

from polynl.errors import SettingsError
from polynl.tasks.face_detection.matlab import DEEPEST, MOST_BYTES, Value, read_matlab

DATA = os.environ.get("POLYNL_DATA")


def same(ours: Value, theirs: Any) -> bool:
    if isinstance(ours, list):
        return theirs.dtype == object and len(ours) == theirs.size and all(map(same, ours, theirs.T.flat))
    if isinstance(ours, str):
        return theirs.dtype.kind == "U" and ours == "".join(theirs)
    return ours.shape == theirs.shape and np.array_equal(ours, theirs.astype(np.float64))


def assert_as_scipy_reads_it(path: Path) -> None:
    theirs = {name: value for name, value in loadmat(str(path)).items() if not name.startswith("__")}
    ours = read_matlab(path, theirs)
    assert list(ours) == list(theirs)
    assert [name for name in ours if not same(ours[name], theirs[name])] == []


@pytest.mark.parametrize("compressed", [False, True])
def test_it_is_what_scipy_reads(tmp_path: Path, compressed: bool) -> None:
    numbers = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in ("i1", "u2", "i4", "u8", "f4", "f8")}
    others = {
        "text": "näher 漢",
        "no_text": "",
        "nothing": np.zeros((0, 4)),
        "two": np.full((2, 2), "x", object),
    }
    savemat(tmp_path / "a.mat", {**content("hard"), **numbers, **others}, do_compression=compressed)
    assert_as_scipy_reads_it(tmp_path / "a.mat")


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with WIDER FACE's ground truth")
@pytest.mark.parametrize("name", ["face", "hard"])
def test_official_files_are_what_scipy_reads(name: str) -> None:
    assert_as_scipy_reads_it(Path(str(DATA), "widerface-ground-truth", f"wider_{name}_val.mat"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("files") / "a.mat"
    savemat(path, content("hard"))
    return path.read_bytes()


def refusal(path: Path, data: bytes) -> str | None:
    """What is wrong with a file of these bytes; None if it is read."""
    path.write_bytes(data)
    try:
        read_matlab(path, content("hard"))
    except SettingsError as error:
        message = str(error)
    else:
        return None
    assert message.startswith(f"{path} cannot be read as a Matlab file: ")
    assert "\n" not in message
    return message


def test_whatever_bytes_are_changed_it_is_read_or_refused(tmp_path: Path, plain: bytes) -> None:
    """No checksum protects an uncompressed file, so every check is met; SciPy crashes at some of these."""
    draw, refused = random.Random(0), 0
    for _ in range(500):
        data = bytearray(plain)
        for place in draw.sample(range(128, len(data)), draw.choice([1, 1, 3])):
            data[place] = draw.choice([0, 1, 14, 15, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        refused += refusal(tmp_path / "a.mat", bytes(data)) is not None
    assert 150 < refused < 500


def test_wherever_it_is_cut_it_is_refused(tmp_path: Path, plain: bytes) -> None:
    variables = [128]
    while variables[-1] < len(plain):
        variables.append(variables[-1] + 8 + struct.unpack_from("<I", plain, variables[-1] + 4)[0])
    for cut in range(0, len(plain), 7):
        assert (refusal(tmp_path / "a.mat", plain[:cut]) is None) == (cut in variables)


def test_a_changed_byte_in_a_compressed_file_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    savemat(path, content("hard"), do_compression=True)
    whole, read = path.read_bytes(), repr(read_matlab(path, content("hard")))
    for place in range(136, len(whole), 11):
        data = whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :]
        found = refusal(path, data) is not None
        assert found or repr(read_matlab(path, content("hard"))) == read, place


def test_bombs_are_refused(tmp_path: Path, plain: bytes) -> None:
    packed = zlib.compress(bytes(MOST_BYTES + 1))
    bomb = plain[:128] + struct.pack("<II", 15, len(packed)) + packed
    assert "more than 16,777,216 bytes" in str(refusal(tmp_path / "a.mat", bomb))
    nested = np.zeros((1, 1))
    for _ in range(DEEPEST + 1):
        nested = cells([nested])
    savemat(tmp_path / "deep.mat", {"event_list": nested})
    assert "nested more than 8 deep" in str(refusal(tmp_path / "a.mat", (tmp_path / "deep.mat").read_bytes()))
