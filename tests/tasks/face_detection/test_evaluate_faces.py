"""`polynl evaluate-faces`: the official scores of a folder of predictions, as a user asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from official_files import BAND, CAR, PARADE, write_truth
from PIL import Image

from polynl.tasks.face_detection.files import write_predictions

PERFECT = {
    BAND: np.array([[331.0, 126, 30, 30, 0.9], [345, 211, 4, 5, 0.8]]),
    PARADE: np.array([[1.0, 2, 3, 0, 0.7]]),
    CAR: np.zeros((0, 5)),
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    write_predictions(tmp_path / "found", PERFECT)
    return tmp_path / "found", write_truth(tmp_path / "truth")


def evaluate(capsys: Any, folders: tuple[Path, Path], *words: object) -> tuple[int, str, str]:
    curves = ["--curves", folders[0].parent / "curves.png"]
    return run(capsys, "evaluate-faces", folders[0], "--ground-truth", folders[1], *curves, *words)


def test_scores_to_five_digits_and_curves(folders: tuple[Path, Path], capsys: Any) -> None:
    code, shown, _ = evaluate(capsys, folders)
    assert code == 0
    assert shown.splitlines()[:3] == ["    Easy 1.00000", "  Medium 1.00000", "    Hard 1.00000"]
    assert f"Scored on all images. Curves: {folders[0].parent / 'curves.png'}" in shown
    with Image.open(folders[0].parent / "curves.png") as picture:
        assert min(picture.size) > 500


def test_a_mistake_costs(folders: tuple[Path, Path], capsys: Any) -> None:
    """A wrong box that is surer than the others: precision 1/2 at the Easy face, 2/3 and 3/4 further on."""
    write_predictions(
        folders[0], {CAR: np.zeros((0, 5)), PARADE: [[500, 500, 9, 9, 0.95], [1, 2, 3, 0, 0.7]]}
    )
    code, shown, _ = evaluate(capsys, folders)
    assert code == 0
    assert shown.splitlines()[:3] == ["    Easy 0.50000", "  Medium 0.66667", "    Hard 0.75000"]


def test_a_part_of_the_images(folders: tuple[Path, Path], capsys: Any) -> None:
    (folders[0] / PARADE[0] / f"{PARADE[1]}.txt").unlink()
    code, _, err = evaluate(capsys, folders)
    assert code == 2
    assert f"{PARADE[1]}.txt is missing (1 of 3 files are)" in err
    code, shown, _ = evaluate(capsys, folders, "--partial")
    assert code == 0
    assert "Scored on 2 of 3 images" in shown
    assert shown.splitlines()[2] == "    Hard 1.00000"


def test_no_predictions_at_all(folders: tuple[Path, Path], capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    code, _, err = evaluate(capsys, (tmp_path / "nothing", folders[1]), "--partial")
    assert code == 2
    assert "is missing (3 of 3 files are)" in err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{BAND[1]}\n1\n1 2 3 4 nan\n", "line 3: expected x y w h score"),
        (f"{BAND[1]}\n2\n1 2 3 4 0.5\n", "line 2: the number is 2, but 1 lines follow"),
        ("other\n0\n", f"line 1: expected the image's name, {BAND[1]}, got 'other'"),
    ],
)
def test_a_file_with_a_mistake(content: str, expected: str, folders: tuple[Path, Path], capsys: Any) -> None:
    file = folders[0] / BAND[0] / f"{BAND[1]}.txt"
    file.write_text(content)
    code, out, err = evaluate(capsys, folders)
    assert (code, out) == (2, "")
    assert str(file) in err
    assert expected in err


def test_folders_that_are_not_there(folders: tuple[Path, Path], capsys: Any, tmp_path: Path) -> None:
    for wrong in ((tmp_path / "x", folders[1]), (folders[0], tmp_path / "x")):
        code, out, err = evaluate(capsys, wrong)
        assert (code, out) == (2, "")
        assert str(tmp_path / "x") in err
    code, _, err = evaluate(capsys, folders, "--curves", tmp_path)
    assert code == 2
    assert f"--curves: {tmp_path} is a folder; expected a file." in err


@pytest.mark.parametrize(
    ("name", "expected"), [("file/x.png", "cannot be written"), ("x.pdf", "must end in .png")]
)
def test_curves_that_cannot_be_drawn(
    name: str, expected: str, folders: tuple[Path, Path], capsys: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = evaluate(capsys, folders, "--curves", tmp_path / name)
    assert (code, out) == (2, "")
    assert expected in err
