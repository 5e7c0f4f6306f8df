"""WIDER FACE's files: the official ground truth, and the predictions of any detector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polynl.data.annotation_files import is_count, read_lines
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


def read_ground_truth(folder: Path) -> GroundTruth:
    """Read the official `wider_face_val.mat` and `wider_{easy,medium,hard}_val.mat`."""
    boxes = _read_mat(folder / "wider_face_val.mat", "face_bbx_list")
    for image, array in boxes.items():
        if array.size == 0:
            boxes[image] = np.zeros((0, 4))
        elif array.ndim != 2 or array.shape[1] != 4 or not np.isfinite(array).all():
            where = f"{folder / 'wider_face_val.mat'}, face_bbx_list of {'/'.join(image)}"
            raise SettingsError(f"{where}: expected finite x, y, w, h, got {_shown(array)}.")
    counted: dict[Image, dict[str, Array]] = {image: {} for image in boxes}
    for subset in SUBSETS:
        path = folder / f"wider_{subset}_val.mat"
        rows = _read_mat(path, "gt_list")
        if rows.keys() != boxes.keys():
            raise SettingsError(
                f"{path} lists other images than wider_face_val.mat: use files of one release."
            )
        for image, numbers in rows.items():
            counted[image][subset] = _rows(path, image, numbers.ravel(), len(boxes[image]))
    return GroundTruth({image: Faces(boxes[image], counted[image]) for image in boxes})


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


def _read_mat(path: Path, key: str) -> dict[Image, Array]:
    """The numbers of each image; `key` has a cell for each event, which has one for each of its images."""
    from scipy.io import loadmat  # takes a fifth of a second to import

    if not path.is_file():
        raise SettingsError(
            f"{path} is missing: expected a folder with wider_face_val.mat and "
            "wider_{easy,medium,hard}_val.mat, which is ground_truth in WIDER FACE's eval_tools."
        )
    lists = ("event_list", "file_list", key)
    try:
        content: dict[str, Any] = loadmat(str(path), variable_names=lists)
    except Exception as error:  # scipy raises anything for damaged bytes
        raise SettingsError(
            f"{path} cannot be read as a Matlab file: {error or type(error).__name__}."
        ) from None
    if missing := [name for name in lists if name not in content]:
        raise SettingsError(f"{path} has no {missing[0]}: use the official file.")
    events = _names(f"{path}, event_list", content["event_list"])
    files, numbers = (_cells(f"{path}, {name}", content[name], events) for name in lists[1:])
    found: dict[Image, Array] = {}
    for event, listed, cells in zip(events, files, numbers, strict=True):
        names = _names(f"{path}, file_list of {event}", listed)
        for name, cell in zip(names, _cells(f"{path}, {key} of {event}", cells, names), strict=True):
            if not (isinstance(cell, np.ndarray) and cell.dtype.kind in "iuf"):
                raise SettingsError(f"{path}, {key} of {event}/{name}: expected numbers, got {_shown(cell)}.")
            found[event, name] = cell.astype(np.float64)
    return found


def _cells(where: str, value: Any, names: Sequence[str] | None = None) -> list[Any]:
    """The content of a column of cells, one for each of `names`."""
    if not (isinstance(value, np.ndarray) and value.dtype == object):
        raise SettingsError(f"{where}: expected cells, got {_shown(value)}.")
    if names is not None and value.size != len(names):
        raise SettingsError(f"{where}: expected {len(names)} cells, got {value.size}.")
    return list(value.ravel())


def _names(where: str, value: Any) -> list[str]:
    """The texts in a column of cells, each of them once."""
    names: list[str] = []
    for cell in _cells(where, value):
        if not (isinstance(cell, np.ndarray) and cell.dtype.kind == "U" and cell.size == 1):
            raise SettingsError(f"{where}: expected a name, got {_shown(cell)}.")
        if cell.item() in names:
            raise SettingsError(f"{where}: {cell.item()} is listed more than once.")
        names.append(str(cell.item()))
    return names


def _shown(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def _rows(path: Path, image: Image, numbers: Array, faces: int) -> Array:
    """The rows of the faces that count; the file numbers them from 1."""
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
    files = {(file.parent.name, file.stem): file for file in sorted(folder.glob("[!.]*/[!.]*.txt"))}
    for image, file in files.items():
        if image not in truth:
            hint = near_matches("/".join(image), map("/".join, truth))
            raise SettingsError(f"{file} does not belong to an image of the ground truth.{hint}")
    return files


def _read_detections(path: Path, image: Image) -> Array:
    lines = read_lines(path)
    name = lines[0].strip().replace("\\", "/").rpartition("/")[2]
    stem, dot, suffix = name.rpartition(".")
    if image[1] != name and not (image[1] == stem and dot and suffix.lower() in ("jpg", "jpeg", "png")):
        found = "the file is empty" if lines == [""] else f"got {lines[0].strip()[:100]!r}"
        raise SettingsError(f"{path}, line 1: expected the image's name, {image[1]}, {found}.")
    count = lines[1].strip() if len(lines) > 1 else ""
    if not is_count(count):
        raise SettingsError(f"{path}, line 2: expected the number of detections, got {count[:100]!r}.")
    if int(count) != len(lines) - 2:
        raise SettingsError(f"{path}, line 2: the number is {count}, but {len(lines) - 2} lines follow.")
    rows = [_row(line) for line in lines[2:]]
    if None in rows:
        number = rows.index(None) + 2
        raise SettingsError(
            f"{path}, line {number + 1}: expected x y w h score, finite numbers with w and h not negative, "
            f"got {lines[number].strip()[:100]!r}."
        )
    return np.array(rows, dtype=np.float64).reshape(-1, 5)


def _row(line: str) -> list[float] | None:
    try:
        row = list(map(float, line.split()))
    except ValueError:
        return None
    return row if len(row) == 5 and all(map(math.isfinite, row)) and min(row[2:4]) >= 0 else None
