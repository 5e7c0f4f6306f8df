"""WIDER FACE's ground truth in the official layout, three images large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import savemat

from polynl.tasks.face_detection.metric import SUBSETS

# Names as the official ones are; the second event has an image without faces.
NAMES = {
    "0--Parade": ["0_Parade_band_1_465", "0_Parade_Parade_0_628"],
    "59--people--driving--car": ["59_peopledrivingcar_9"],
}
BOXES = [[[[345, 211, 4, 5], [331, 126, 30, 30]], [[1, 2, 3, 0]]], [[]]]
COUNTED = {"easy": [[[2], []], [[]]], "medium": [[[2], [1]], [[]]], "hard": [[[1, 2], [1]], [[]]]}
BAND = ("0--Parade", "0_Parade_band_1_465")
PARADE = ("0--Parade", "0_Parade_Parade_0_628")
CAR = ("59--people--driving--car", "59_peopledrivingcar_9")


def cells(values: list[Any]) -> np.ndarray:
    """A column of cells, as Matlab has it."""
    column = np.empty((len(values), 1), dtype=object)
    for place, value in enumerate(values):
        column[place, 0] = value
    return column


def by_image(lists: list[list[Any]], dtype: str, columns: int) -> np.ndarray:
    return cells(
        [cells([np.array(one, dtype=dtype).reshape(-1, columns) for one in event]) for event in lists]
    )


def content(name: str) -> dict[str, Any]:
    """Of one of the four files, in the official layout."""
    lists: dict[str, Any] = {
        "event_list": cells(list(NAMES)),
        "file_list": cells([cells(names) for names in NAMES.values()]),
        "face_bbx_list": by_image(BOXES, "int32", 4),
    }
    return lists if name == "face" else {**lists, "gt_list": by_image(COUNTED[name], "uint8", 1)}


def write_truth(folder: Path, **changes: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("face", *SUBSETS):
        changed = {**content(name), **changes.get(name, {})}
        savemat(folder / f"wider_{name}_val.mat", {k: v for k, v in changed.items() if v is not None})
    return folder
