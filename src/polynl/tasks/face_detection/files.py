"""WIDER FACE's files: the official ground truth, and the predictions of any detector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polynl.errors import SettingsError, near_matches
from polynl.files import write_atomically
from polynl.tasks.face_detection.metric import (
    SUBSETS,
    Array,
    Faces,
    GroundTruth,
    Image,
    Predictions,
    checked_detections,
)

_ROW = "x y w h score"


def read_ground_truth(folder: Path) -> GroundTruth:
    """Read the official `wider_face_val.mat` and `wider_{easy,medium,hard}_val.mat`."""
    path = folder / "wider_face_val.mat"
    content = _read_mat(path, ["event_list", "file_list", "face_bbx_list"])
    names = _names(path, content)
    boxes = {
        image: _boxes(path, image, cell)
        for image, cell in _cells_of_images(path, content, "face_bbx_list", names)
    }
    counted = {subset: _counted(folder, subset, names, boxes) for subset in SUBSETS}
    return GroundTruth(
        {
            image: Faces(boxes[image], {subset: counted[subset][image] for subset in SUBSETS})
            for image in boxes
        }
    )


def read_predictions(folder: Path, truth: GroundTruth, *, partial: bool = False) -> Predictions:
    """Read `folder/event/image.txt` for every image; a SettingsError names the file and line.

    A file has the image's name, the number of detections, and a line `x y w h score` for each. The name may
    have a suffix and folders in front. With `partial`, images may be missing, but not all of them.
    """
    files = _files(folder, truth)
    missing = [image for image in truth if image not in files]
    if missing and not (partial and files):
        raise SettingsError(
            f"{_path(folder, missing[0])} is missing ({len(missing):,} of {len(truth):,} files are): "
            "every image needs one, with the count 0 if nothing is found."
        )
    return {image: _read_detections(files[image], image) for image in truth if image in files}


def write_predictions(folder: Path, predictions: Predictions) -> None:
    """Write `folder/event/image.txt` for each image; reading them gives the same numbers."""
    for image, detections in predictions.items():
        rows = checked_detections(image, detections).tolist()
        lines = [image[1], str(len(rows)), *(" ".join(map(repr, row)) for row in rows)]
        write_atomically(_path(folder, image), "\n".join(lines) + "\n", durable=False)


# Ground truth


def _read_mat(path: Path, names: Sequence[str]) -> dict[str, Any]:
    from scipy.io import loadmat  # takes a fifth of a second to import

    if not path.is_file():
        raise SettingsError(
            f"{path} is missing: expected a folder with wider_face_val.mat and "
            "wider_{easy,medium,hard}_val.mat, which is ground_truth in WIDER FACE's eval_tools."
        )
    try:
        content: dict[str, Any] = loadmat(str(path), variable_names=list(names))
    except Exception as error:  # scipy raises anything for damaged bytes
        raise SettingsError(
            f"{path} cannot be read as a Matlab file: {error or type(error).__name__}."
        ) from None
    for name in names:
        if name not in content:
            raise SettingsError(f"{path} has no {name}: use the official file.")
    return content


def _cells(path: Path, where: str, value: Any) -> list[Any]:
    """The content of a column of cells."""
    if not (isinstance(value, np.ndarray) and value.dtype == object):
        raise SettingsError(f"{path}, {where}: expected cells, got {_shown(value)}.")
    return list(value.ravel())


def _text(path: Path, where: str, value: Any) -> str:
    if not (isinstance(value, np.ndarray) and value.dtype.kind == "U" and value.size == 1):
        raise SettingsError(f"{path}, {where}: expected a name, got {_shown(value)}.")
    return str(value.item())


def _shown(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def _names(path: Path, content: dict[str, Any]) -> dict[str, list[str]]:
    """The names of images by event."""
    events = [_text(path, "event_list", cell) for cell in _cells(path, "event_list", content["event_list"])]
    lists = _cells(path, "file_list", content["file_list"])
    if len(lists) != len(events):
        raise SettingsError(f"{path}: event_list has {len(events)} events, and file_list {len(lists)}.")
    _check_once(path, "event_list", events)
    names: dict[str, list[str]] = {}
    for event, cells in zip(events, lists, strict=True):
        where = f"file_list of {event}"
        names[event] = [_text(path, where, cell) for cell in _cells(path, where, cells)]
        _check_once(path, where, names[event])
    return names


def _check_once(path: Path, where: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingsError(f"{path}, {where}: {twice} is listed more than once.")


def _cells_of_images(
    path: Path, content: dict[str, Any], key: str, names: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Image, Any]]:
    """Each image with its cell of a list that has a cell of cells for each event."""
    lists = _cells(path, key, content[key])
    if len(lists) != len(names):
        raise SettingsError(f"{path}: {key} has {len(lists)} events: expected {len(names)}.")
    for event, cells in zip(names, lists, strict=True):
        found = _cells(path, f"{key} of {event}", cells)
        if len(found) != len(names[event]):
            raise SettingsError(
                f"{path}: {key} of {event} has {len(found)} images: expected {len(names[event])}."
            )
        for name, cell in zip(names[event], found, strict=True):
            yield (event, name), cell


def _boxes(path: Path, image: Image, cell: Any) -> Array:
    if not (isinstance(cell, np.ndarray) and cell.dtype.kind in "iuf"):
        raise SettingsError(f"{path}, faces of {'/'.join(image)}: expected numbers, got {_shown(cell)}.")
    if cell.size == 0:
        return np.zeros((0, 4))
    if cell.ndim != 2 or cell.shape[1] != 4 or not np.isfinite(cell).all():
        raise SettingsError(
            f"{path}, faces of {'/'.join(image)}: expected finite x, y, w, h, got {_shown(cell)}."
        )
    return cell.astype(np.float64)


def _counted(
    folder: Path, subset: str, names: Mapping[str, Sequence[str]], boxes: Mapping[Image, Array]
) -> dict[Image, Array]:
    """The rows of the faces that count in a subset, by image; the file numbers them from 1."""
    path = folder / f"wider_{subset}_val.mat"
    content = _read_mat(path, ["event_list", "file_list", "gt_list"])
    if _names(path, content) != names:
        raise SettingsError(f"{path} lists other images than wider_face_val.mat: use files of one release.")
    cells = _cells_of_images(path, content, "gt_list", names)
    return {image: _rows(path, image, cell, len(boxes[image])) for image, cell in cells}


def _rows(path: Path, image: Image, cell: Any, faces: int) -> Array:
    if not (isinstance(cell, np.ndarray) and cell.dtype.kind in "iuf"):
        raise SettingsError(f"{path}, gt_list of {'/'.join(image)}: expected numbers, got {_shown(cell)}.")
    numbers = cell.ravel()
    wrong = (numbers < 1) | (numbers > faces) | (numbers != np.floor(numbers))
    if wrong.any() or len(np.unique(numbers)) < len(numbers):
        raise SettingsError(
            f"{path}, gt_list of {'/'.join(image)}: expected different numbers from 1 to {faces}, as many "
            f"faces as it has in wider_face_val.mat, got {numbers.tolist()[:20]}."
        )
    return numbers.astype(np.intp) - 1


# Predictions


def _path(folder: Path, image: Image) -> Path:
    event, name = image
    return folder / event / f"{name}.txt"


def _files(folder: Path, truth: GroundTruth) -> dict[Image, Path]:
    """The files in the folder by image; each must belong to an image of the ground truth."""
    if not folder.is_dir():
        raise SettingsError(
            f"{folder} is not a folder: expected one with a folder of text files for each event."
        )
    events = truth.events
    there = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for entry in there:
        if entry.name not in events:
            hint = near_matches(entry.name, events)
            raise SettingsError(f"{entry} is not an event of the ground truth.{hint}")
    files = {(entry.name, file.stem): file for entry in there for file in sorted(entry.glob("[!.]*.txt"))}
    for image, file in files.items():
        if image not in truth:
            hint = near_matches(image[1], [name for event, name in truth if event == image[0]])
            raise SettingsError(f"{file} does not belong to an image of the ground truth.{hint}")
    return files


def _read_detections(path: Path, image: Image) -> Array:
    lines = _lines(path)
    _check_head(path, image, lines)
    try:
        array = np.array([list(map(float, line.split())) for line in lines[2:]], dtype=np.float64)
    except ValueError:
        array = np.zeros(0)
    array = array.reshape(0, 5) if len(lines) == 2 else array
    if array.ndim != 2 or array.shape[1] != 5 or not np.isfinite(array).all() or (array[:, 2:4] < 0).any():
        raise _first_wrong_line(path, lines)
    return array


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise _no_utf_8(path, error) from None
    return text.rstrip().split("\n")


def _no_utf_8(path: Path, error: UnicodeDecodeError) -> SettingsError:
    # The wrong byte does not end a line, so it is in the last line up to it.
    read = error.object[: error.start + 1]
    line, byte = len(read.splitlines()), read[-1]
    return SettingsError(f"{path}, line {line}: byte {byte:#04x} is not UTF-8; save the file as UTF-8 text.")


def _check_head(path: Path, image: Image, lines: Sequence[str]) -> None:
    """Check that the first two lines are the image's name and the number of the others."""
    name = lines[0].strip().replace("\\", "/").rpartition("/")[2]
    stem, dot, suffix = name.rpartition(".")
    if image[1] != name and not (image[1] == stem and dot and suffix.lower() in ("jpg", "jpeg", "png")):
        found = "the file is empty" if lines == [""] else f"got {lines[0].strip()[:100]!r}"
        raise SettingsError(f"{path}, line 1: expected the image's name, {image[1]}, {found}.")
    if len(lines) < 2:
        raise SettingsError(f"{path}, line 2: expected the number of detections, but the file ends.")
    count = lines[1].strip()
    if not (count.isascii() and count.isdigit() and len(count) < 10):
        raise SettingsError(f"{path}, line 2: expected the number of detections, got {count[:100]!r}.")
    if int(count) != len(lines) - 2:
        raise SettingsError(f"{path}, line 2: the number is {count}, but {len(lines) - 2} lines follow.")


def _first_wrong_line(path: Path, lines: Sequence[str]) -> SettingsError:
    for number, line in enumerate(lines[2:], 3):
        if wrong := _wrong(line.split()):
            return SettingsError(f"{path}, line {number}: {wrong}, got {line.strip()[:100]!r}.")
    raise AssertionError(f"{path} was refused, but every line is correct.")


def _wrong(words: Sequence[str]) -> str:
    """What is wrong with a line, if anything."""
    if len(words) != 5:
        return f"expected five numbers, {_ROW}"
    for name, word in zip(_ROW.split(), words, strict=True):
        try:
            number = float(word)
        except ValueError:
            return f"{name} is not a number"
        if not math.isfinite(number):
            return f"{name} is not finite"
        if name in ("w", "h") and number < 0:
            return f"{name} is negative, and boxes are x y w h, not two corners"
    return ""
