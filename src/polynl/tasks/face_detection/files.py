"""WIDER FACE's files: the official ground truth, and the predictions of any detector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polynl.data.annotation_files import is_count, read_lines
from polynl.errors import SettingsError, near_matches
from polynl.files import write_atomically
from polynl.tasks.face_detection.matlab import Value, read_matlab
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
        elif array.shape[1] != 4 or not np.isfinite(array).all():
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
    if not path.is_file():
        raise SettingsError(
            f"{path} is missing: expected a folder with wider_face_val.mat and "
            "wider_{easy,medium,hard}_val.mat, which is ground_truth in WIDER FACE's eval_tools."
        )
    lists = ("event_list", "file_list", key)
    content = read_matlab(path, lists)
    if missing := [name for name in lists if name not in content]:
        raise SettingsError(f"{path} has no {missing[0]}: use the official file.")
    events = _names(f"{path}, event_list", content["event_list"])
    files, numbers = (_cells(f"{path}, {name}", content[name], events) for name in lists[1:])
    found: dict[Image, Array] = {}
    for event, listed, cells in zip(events, files, numbers, strict=True):
        names = _names(f"{path}, file_list of {event}", listed)
        for name, cell in zip(names, _cells(f"{path}, {key} of {event}", cells, names), strict=True):
            if not isinstance(cell, np.ndarray):
                raise SettingsError(f"{path}, {key} of {event}/{name}: expected numbers, got {_shown(cell)}.")
            found[event, name] = cell
    return found


def _cells(where: str, value: Value, names: Sequence[str] | None = None) -> list[Value]:
    """The content of a column of cells, one for each of `names`."""
    if not isinstance(value, list):
        raise SettingsError(f"{where}: expected cells, got {_shown(value)}.")
    if names is not None and len(value) != len(names):
        raise SettingsError(f"{where}: expected {len(names)} cells, got {len(value)}.")
    return value


def _names(where: str, value: Value) -> list[str]:
    """The texts in a column of cells, each of them once."""
    names: dict[str, None] = {}
    for cell in _cells(where, value):
        if not isinstance(cell, str) or not cell:
            raise SettingsError(f"{where}: expected a name, got {_shown(cell)}.")
        if cell in names:
            raise SettingsError(f"{where}: {cell} is listed more than once.")
        names[cell] = None
    return list(names)


def _shown(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.shape[0]} × {value.shape[1]} numbers"
    return repr(value[:100]) if isinstance(value, str) else f"{len(value)} cells"


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
    # Officially an event is a folder; images in COCO's format may be at any depth.
    depths = {0 if event == "." else event.count("/") + 1 for event, _ in truth}
    patterns = ["/".join([*["[!.]*"] * depth, "[!.]*.txt"]) for depth in sorted(depths)]
    there = sorted(file for pattern in patterns for file in folder.glob(pattern))
    files = {(file.parent.relative_to(folder).as_posix(), file.stem): file for file in there}
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
