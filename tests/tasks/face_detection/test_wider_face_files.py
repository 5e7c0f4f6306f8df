"""WIDER FACE's ground truth and predictions, and what is said about files that are wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_files import BAND, BOXES, CAR, NAMES, PARADE, by_image, cells, content, write_truth
from scipy.io import loadmat

from polynl.errors import SettingsError
from polynl.tasks.face_detection.files import read_ground_truth, read_predictions, write_predictions
from polynl.tasks.face_detection.metric import SUBSETS, GroundTruth, wider_face_scores

DATA = os.environ.get("POLYNL_DATA")


@pytest.fixture
def truth(tmp_path: Path) -> GroundTruth:
    return read_ground_truth(write_truth(tmp_path / "truth"))


# Ground truth


def test_the_official_layout_is_read(truth: GroundTruth) -> None:
    assert list(truth) == [BAND, PARADE, CAR]
    assert truth.events == list(NAMES)
    assert [truth[image].boxes.tolist() for image in truth] == [BOXES[0][0], BOXES[0][1], []]
    assert all(truth[image].boxes.shape[1] == 4 and truth[image].boxes.dtype == np.float64 for image in truth)
    rows = {subset: [truth[image].counted[subset].tolist() for image in truth] for subset in SUBSETS}
    assert rows == {"easy": [[1], [], []], "medium": [[1], [0], []], "hard": [[0, 1], [0], []]}
    assert [truth.count(subset) for subset in SUBSETS] == [1, 2, 3]


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with WIDER FACE's ground truth")
def test_the_official_files_are_read() -> None:
    truth = read_ground_truth(Path(str(DATA)) / "widerface-ground-truth")
    assert (len(truth), len(truth.events)) == (3226, 61)
    assert [truth.count(subset) for subset in SUBSETS] == [7211, 13319, 31958]
    predictions = {
        image: np.column_stack([np.maximum(faces.boxes, [-9, -9, 0, 0]), np.ones(len(faces.boxes))])
        for image, faces in truth.items()
    }
    # Some faces are there twice, and one is -2 wide: even the truth is not quite perfect.
    assert all(99.9 < score <= 100 for score in wider_face_scores(truth, predictions).values())


@pytest.mark.parametrize("name", ["face", *SUBSETS])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_truth(tmp_path)
    path = folder / f"wider_{name}_val.mat"
    whole = path.read_bytes()
    for damaged in (b"", b"no Matlab file" * 100, whole[: len(whole) // 2], whole[:200]):
        path.write_bytes(damaged)
        with pytest.raises(
            SettingsError, match=rf"wider_{name}_val\.mat (cannot be read as a Matlab|has no \w+)"
        ):
            read_ground_truth(folder)
    path.unlink()
    with pytest.raises(SettingsError, match=rf"wider_{name}_val\.mat is missing: expected a folder with"):
        read_ground_truth(folder)


def lacking(lists: np.ndarray) -> np.ndarray:
    """Without the last image of the first event."""
    return cells([lists[0, 0][:-1], *lists[1:, 0]])


def boxes(*numbers: float) -> dict[str, Any]:
    """Faces of which the first event's have these numbers."""
    return {"face_bbx_list": by_image([[numbers, numbers], [[]]], "float", len(numbers))}


def hard(first: list[float], *, last: tuple[int, ...] = ()) -> dict[str, Any]:
    """A subset with these numbers for the first image, and for the last, which has no faces."""
    return {"gt_list": by_image([[first, [1]], [last]], "float", 1)}


FILES, FACES = content("face")["file_list"], content("face")["face_bbx_list"]
OTHERS, TWICE = cells([cells(["x", "y"]), cells(["z"])]), cells([cells(["x", "x"]), cells(["z"])])
WRONG_TRUTH: list[tuple[str, dict[str, Any], str]] = [
    ("face", {"face_bbx_list": None}, " has no face_bbx_list: use the official file."),
    ("hard", {"gt_list": None}, " has no gt_list: use the official file."),
    ("face", {"event_list": np.ones((2, 1))}, ", event_list: expected cells, got 2 × 1 numbers."),
    ("face", {"event_list": cells([1, 2])}, ", event_list: expected a name, got "),
    ("face", {"event_list": cells(["0--Parade"])}, ", file_list: expected 1 cells, got 2."),
    ("face", {"event_list": cells(["a", "a"])}, ", event_list: a is listed more than once."),
    ("face", {"file_list": TWICE}, ", file_list of 0--Parade: x is listed more than once."),
    ("face", {"face_bbx_list": FACES[:1]}, ", face_bbx_list: expected 2 cells, got 1."),
    ("face", {"face_bbx_list": lacking(FACES)}, ", face_bbx_list of 0--Parade: expected 2 cells, got 1."),
    (
        "face",
        {"face_bbx_list": FILES},
        ", face_bbx_list of 0--Parade/0_Parade_band_1_465: expected numbers, got '0_Parade_band_1_465'.",
    ),
    (
        "face",
        boxes(1, 2, 3),
        ", face_bbx_list of 0--Parade/0_Parade_band_1_465: expected finite x, y, w, h, got 1 × 3 numbers.",
    ),
    (
        "face",
        boxes(1, 2, 3, np.nan),
        ", face_bbx_list of 0--Parade/0_Parade_band_1_465: expected finite x, y, w, h",
    ),
    (
        "easy",
        {"file_list": OTHERS},
        " lists other images than wider_face_val.mat: use files of one release.",
    ),
    ("medium", {"gt_list": lacking(FACES)}, ", gt_list of 0--Parade: expected 2 cells, got 1."),
    (
        "hard",
        {"gt_list": FILES},
        ", gt_list of 0--Parade/0_Parade_band_1_465: expected numbers, got '0_Parade_band_1_465'.",
    ),
    (
        "hard",
        hard([1, 3]),
        ", gt_list of 0--Parade/0_Parade_band_1_465: expected different numbers from 1 to 2, as many faces "
        "as it has in wider_face_val.mat, got [1.0, 3.0].",
    ),
    ("hard", hard([0]), ", gt_list of 0--Parade/0_Parade_band_1_465: expected different numbers from 1 to 2"),
    ("hard", hard([2, 2]), ", gt_list of 0--Parade/0_Parade_band_1_465: expected different numbers"),
    ("hard", hard([1.5]), ", gt_list of 0--Parade/0_Parade_band_1_465: expected different numbers"),
    ("hard", hard([np.nan]), ", gt_list of 0--Parade/0_Parade_band_1_465: expected different numbers"),
    ("hard", hard([1], last=(1,)), ", gt_list of 59--people--driving--car/59_peopledrivingcar_9: expected"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG_TRUTH)
def test_files_that_do_not_fit_are_named(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        read_ground_truth(write_truth(tmp_path, **{name: change}))
    assert str(raised.value).startswith(f"{tmp_path / f'wider_{name}_val.mat'}{message}")


def test_the_tests_write_what_matlab_wrote(tmp_path: Path) -> None:
    hard = loadmat(write_truth(tmp_path) / "wider_hard_val.mat")
    assert hard["event_list"][0][0].item() == "0--Parade"
    assert hard["file_list"][0][0][1][0].item() == "0_Parade_Parade_0_628"
    assert hard["gt_list"][0][0][0][0].tolist() == [[1], [2]]
    assert hard["face_bbx_list"][0][0][1][0].tolist() == [[1, 2, 3, 0]]


# Predictions

ROWS = np.array([[345.25, 211, 4, 5, 0.9], [-3, 2.5, 0, 0, 0.125], [1e-3, 1, 1 / 3, 2, 1e-9]])
BAND_TEXT = "0_Parade_band_1_465\n2\n1 2 3 4 0.5\n5 6 7 8 0.25\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_predictions(tmp_path / "found", {BAND: ROWS, PARADE: ROWS[:1], CAR: ROWS[:0]})
    return tmp_path / "found"


def band(folder: Path) -> Path:
    return folder / BAND[0] / f"{BAND[1]}.txt"


def test_what_is_written_is_read(folder: Path, truth: GroundTruth) -> None:
    predictions = read_predictions(folder, truth)
    assert list(predictions) == list(truth)
    assert [predictions[image].tolist() for image in truth] == [ROWS.tolist(), ROWS[:1].tolist(), []]
    assert predictions[CAR].shape == (0, 5)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == [
        "0--Parade/0_Parade_Parade_0_628.txt",
        "0--Parade/0_Parade_band_1_465.txt",
        "59--people--driving--car/59_peopledrivingcar_9.txt",
    ]
    assert band(folder).read_text().startswith("0_Parade_band_1_465\n3\n345.25 211.0 4.0 5.0 0.9\n-3.0 2.5 ")


def test_what_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="0_Parade_band_1_465, row 0 is"):
        write_predictions(tmp_path / "found", {BAND: ROWS * [1, 1, 1, 1, np.nan]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        BAND_TEXT,
        BAND_TEXT.replace("\n", "\r\n"),
        BAND_TEXT + "\n \n\n",
        BAND_TEXT.rstrip(),
        BAND_TEXT.replace("465\n", "465.jpg\n"),
        BAND_TEXT.replace("465\n", "465.JPG \n"),
        "0--Parade/" + BAND_TEXT,
        "0--Parade/" + BAND_TEXT.replace("465\n", "465.jpg\n"),
        "C:\\val\\0--Parade\\" + BAND_TEXT,
        "\ufeff" + BAND_TEXT,
        BAND_TEXT.replace(" ", "\t"),
        BAND_TEXT.replace("1 2 3 4 0.5", " 1.0  2e0 +3 4. .5 "),
    ],
)
def test_what_other_programs_write_is_understood(folder: Path, truth: GroundTruth, text: str) -> None:
    band(folder).write_bytes(text.encode())
    (folder / ".DS_Store").touch()
    (folder / "detector.log").touch()
    (folder / ".cache").mkdir()
    (folder / "0--Parade" / "._0_Parade_band_1_465.txt").touch()
    assert read_predictions(folder, truth)[BAND].tolist() == [[1, 2, 3, 4, 0.5], [5, 6, 7, 8, 0.25]]


HEAD = "0_Parade_band_1_465\n"
NO_ROW = "expected x y w h score, finite numbers with w and h not negative"
WRONG: list[tuple[str, str]] = [
    ("", "line 1: expected the image's name, 0_Parade_band_1_465, the file is empty."),
    (" \n\n", "line 1: expected the image's name, 0_Parade_band_1_465, the file is empty."),
    ("\n" + BAND_TEXT, "line 1: expected the image's name, 0_Parade_band_1_465, got ''."),
    ("other.jpg\n0\n", "line 1: expected the image's name, 0_Parade_band_1_465, got 'other.jpg'."),
    ("0_Parade_band_1_465.txt\n0\n", "line 1: expected the image's name"),
    ("1_465\n0\n", "line 1: expected the image's name"),
    ("2\n1 2 3 4 0.5\n1 2 3 4 0.5\n", "line 1: expected the image's name, 0_Parade_band_1_465, got '2'."),
    (HEAD, "line 2: expected the number of detections, got ''."),
    (HEAD + "1 2 3 4 0.5\n", "line 2: expected the number of detections, got '1 2 3 4 0.5'."),
    (HEAD + "-1\n", "line 2: expected the number of detections, got '-1'."),
    (HEAD + "9" * 5000, "line 2: expected the number of detections, got '999"),
    (HEAD + "2\n1 2 3 4 0.5\n", "line 2: the number is 2, but 1 lines follow."),
    (HEAD + "0\n1 2 3 4 0.5\n", "line 2: the number is 0, but 1 lines follow."),
    (HEAD + "1\n1 2 3 4 0.5\n\n1 2 3 4 0.5\n", "line 2: the number is 1, but 3 lines follow."),
    (HEAD + "2\n1 2 3 4 0.5\n1 2 3 4\n", f"line 4: {NO_ROW}, got '1 2 3 4'."),
    (HEAD + "1\n1 2 3 4\n", f"line 3: {NO_ROW}, got '1 2 3 4'."),
    (HEAD + "1\n1 2 3 4 0.5 6\n", f"line 3: {NO_ROW}, got '1 2 3 4 0.5 6'."),
    (HEAD + "1\n1,2,3,4,0.5\n", f"line 3: {NO_ROW}, got '1,2,3,4,0.5'."),
    (HEAD + "3\n1 2 3 4 0.5\n\n1 2 3 4 0.5\n", f"line 4: {NO_ROW}, got ''."),
    (HEAD + "2\n1 2 3 4 0.5\n1 2 x 4 0.5\n", f"line 4: {NO_ROW}, got '1 2 x 4 0.5'."),
    (HEAD + "2\n1 2 3 4 0.5\n1 2 3 4 nan\n", f"line 4: {NO_ROW}, got '1 2 3 4 nan'."),
    (HEAD + "2\n1 2 3 4 0.5\n1 2 3 4 -inf\n", f"line 4: {NO_ROW}"),
    (HEAD + "1\n1 1e999 3 4 0.5\n", f"line 3: {NO_ROW}"),
    (HEAD + "1\n1 2 -3 4 0.5\n", f"line 3: {NO_ROW}, got '1 2 -3"),
    (HEAD + "1\n1 2 3 -0.5 0.5\n", f"line 3: {NO_ROW}"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_line_is_named(folder: Path, truth: GroundTruth, text: str, message: str) -> None:
    band(folder).write_text(text)
    with pytest.raises(SettingsError) as raised:
        read_predictions(folder, truth)
    assert str(raised.value).startswith(f"{band(folder)}, {message}")
    assert len(str(raised.value)) < len(str(folder)) + 300


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        (BAND_TEXT.encode("utf-16"), 1, "0xff"),
        (b"\xef\xbb\xbf" + HEAD.encode() + b"\xe9\n", 2, "0xe9"),
        (HEAD.encode() + b"2\n1 2 3 4 0.5\n5 6 \xb77 8 0.25\n", 4, "0xb7"),
        (HEAD.encode() + b"1\n1 2 3 4 0.5\xc3", 3, "0xc3"),
    ],
)
def test_what_is_no_utf_8_is_named_with_its_line(
    folder: Path, truth: GroundTruth, content: bytes, line: int, byte: str, end: bytes
) -> None:
    band(folder).write_bytes(content.replace(b"\n", end))
    with pytest.raises(SettingsError) as raised:
        read_predictions(folder, truth)
    expected = f"{band(folder)}, line {line}: byte {byte} is not UTF-8; save the file as UTF-8 text."
    assert str(raised.value) == expected


def remove_folder(folder: Path) -> None:
    (folder / CAR[0] / f"{CAR[1]}.txt").unlink()
    (folder / CAR[0]).rmdir()


def other_image(folder: Path) -> None:
    (folder / "0--Parade" / "0_Parade_band_1_466.txt").touch()


WRONG_FOLDERS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: band(f).unlink(), r"band_1_465\.txt is missing \(1 of 3 files are\): every image needs one"),
    (remove_folder, r"59--people--driving--car/59_peopledrivingcar_9\.txt is missing \(1 of 3 files are\)"),
    (
        lambda f: (f / "0--Parade").rename(f / "0--Parades"),
        r"/0--Parades/0_P.* does not belong to an image .* Did you mean 0--Parade/0_Parade_",
    ),
    (
        other_image,
        r"band_1_466\.txt does not belong to an image of the .* Did you mean 0--Parade/0_Parade_band",
    ),
    (
        lambda f: f.rename(f.with_name("elsewhere")),
        r"found is not a folder: expected one with a folder of text",
    ),
    (lambda f: (band(f).unlink(), band(f).mkdir()), r"band_1_465\.txt cannot be read: Is a directory\."),
]


@pytest.mark.parametrize(("change", "message"), WRONG_FOLDERS)
def test_missing_and_unknown_files_are_named(
    folder: Path, truth: GroundTruth, change: Callable[[Path], Any], message: str
) -> None:
    change(folder)
    with pytest.raises(SettingsError, match=message):
        read_predictions(folder, truth)


def test_many_files_are_read_alike(tmp_path: Path) -> None:
    """A tenth of the set with 100 detections an image."""
    names = [f"{n}_Parade_{n}" for n in range(320)]
    truth = GroundTruth({("0--Parade", name): None for name in names})  # type: ignore[arg-type]
    rows = np.random.default_rng(0).random((100, 5)) * 1000
    lines = "\n".join(" ".join(map(repr, row)) for row in rows.tolist())
    (tmp_path / "0--Parade").mkdir()
    for name in names:
        (tmp_path / "0--Parade" / f"{name}.txt").write_text(f"{name}\n100\n{lines}\n")
    predictions = read_predictions(tmp_path, truth)
    assert all(np.array_equal(predictions[image], rows) for image in truth)
