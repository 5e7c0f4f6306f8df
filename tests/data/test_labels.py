"""Files with the names of classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from polynl.data.labels import read_labels
from polynl.errors import SettingsError


def written(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_and_json_with_and_without_a_byte_order_mark(tmp_path: Path, mark: str) -> None:
    lines = written(tmp_path, "names.txt", f"{mark}ant\r\n\r\nBiene Maja\r\n")
    assert read_labels(lines) == {0: "ant", 1: "Biene Maja"}
    assert read_labels(written(tmp_path, "names.json", f'{mark}{{"0": "ant"}}')) == {0: "ant"}


def test_names_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    file = written(tmp_path, "names.json", '{"10": "cat", "2": "bee", "1": "ant"}')
    assert list(read_labels(file).items()) == [(1, "ant"), (2, "bee"), (10, "cat")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('["ant", "bee"]', """expected {"0": "ant", "1": "bee"} and so on, got ['ant', 'bee']."""),
        ('{"ant": "0"}', "'ant' is not the number of a class."),
        ('{"-1": "ant"}', "'-1' is not the number of a class."),
        ('{"0": null}', "the name of class 0 is None."),
        ('{"0": "ant"', "Expecting ',' delimiter: line 1 column 12 (char 11)."),
    ],
)
def test_wrong_json_says_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    file = written(tmp_path, "names.json", content)
    with pytest.raises(SettingsError) as error:
        read_labels(file, "--labels")
    assert str(error.value) == f"--labels: {file} is not a JSON object of names by number: {said}"


def test_other_encodings_and_missing_files(tmp_path: Path) -> None:
    file = written(tmp_path, "names.txt", "ant".encode("utf-16"))
    with pytest.raises(SettingsError, match=r"names.txt is not UTF-8 text"):
        read_labels(file)
    with pytest.raises(SettingsError, match=r"data.labels: .*cannot be read: No such file"):
        read_labels(tmp_path / "none.txt", "data.labels")
