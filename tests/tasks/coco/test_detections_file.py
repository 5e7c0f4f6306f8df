"""COCO results files, and what is said about those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from polynl.errors import SettingsError
from polynl.tasks.coco.metric import coco_scores, read_detections, write_detections

TRUTH = {
    "images": [{"id": 1, "height": 4, "width": 6}, {"id": 20, "height": 4, "width": 6}],
    "categories": [{"id": 3, "name": "cat"}, {"id": 90, "name": "dog"}],
    "annotations": [],
}
BOX = {"image_id": 20, "category_id": 3, "score": 0.5, "bbox": [1.5, 1, 2, 0]}
# Columns of 4: 5 pixels of 0, 7 of 1, 12 of 0.
RLE = {
    "size": [4, 6],
    "counts": coco_mask.frPyObjects({"size": [4, 6], "counts": [5, 7, 12]}, 4, 6)["counts"],
}
RLE["counts"] = RLE["counts"].decode()
MASK = {"image_id": 20, "category_id": 3, "score": 0.5, "segmentation": RLE}


def masked(**changes: Any) -> dict[str, Any]:
    return {**MASK, "segmentation": {**RLE, **changes}}


def polygon(*numbers: Any) -> dict[str, Any]:
    return {**MASK, "segmentation": [[0, 0, 3, 0, 3, 3], list(numbers)]}


def lacking(key: str) -> dict[str, Any]:
    return {k: v for k, v in BOX.items() if k != key}


def read(tmp_path: Path, content: Any) -> list[dict[str, Any]]:
    path = tmp_path / "found.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_detections(path, TRUTH)


@pytest.mark.parametrize(
    "found",
    [[], [BOX, {**BOX, "image_id": 1}], [MASK], [{**BOX, **MASK}, MASK]],
    ids=["0", "box", "mask", "both"],
)
def test_what_is_written_is_read(tmp_path: Path, found: list[dict[str, Any]]) -> None:
    path = tmp_path / "below" / "found.json"
    write_detections(path, found)
    assert read_detections(path, TRUTH) == found
    assert json.loads(path.read_text()) == found
    assert [file.name for file in path.parent.iterdir()] == ["found.json"]


@pytest.mark.parametrize(
    "segmentation",
    [
        RLE,
        {"size": [4, 6], "counts": [5, 7, 12]},
        [[1.0, 1, 3, 1, 3, 3, 1, 3]],
        [[0, 0, 3, 0, 3, 3], [4, 4, 6, 4, 6, 1]],
        [[-0.5, 0, 6.5, 0, 6.5, 4.5]],
    ],
)
def test_every_kind_of_mask_becomes_the_same_kind(tmp_path: Path, segmentation: Any) -> None:
    if isinstance(segmentation, list):
        expected = coco_mask.merge(coco_mask.frPyObjects(segmentation, 4, 6))["counts"].decode()
    else:
        expected = RLE["counts"]
    (found,) = read(tmp_path, [{**MASK, "segmentation": segmentation}])
    assert found == {**MASK, "segmentation": {"size": [4, 6], "counts": expected}}


def test_what_other_programs_write_is_understood(tmp_path: Path) -> None:
    assert read(tmp_path, [{**BOX, "id": 7, "area": 3, "image_id": 20.0, "score": 1}]) == [
        {**BOX, "score": 1.0}
    ]
    assert read(tmp_path, [{**BOX, "segmentation": []}]) == [BOX]
    assert read(tmp_path, [{**MASK, "bbox": []}]) == [MASK]


WRONG: list[tuple[Any, str]] = [
    (7, "it is 7: expected an object with image_id, category_id, score, bbox."),
    (None, "it is None: expected"),
    ([BOX], "it is [{"),
    (lacking("image_id"), "it has no image_id: expected one of the ground truth's images."),
    ({**BOX, "image_id": 2}, "its image_id is 2: expected one of the ground truth's images."),
    ({**BOX, "image_id": "20"}, "its image_id is '20': expected"),
    ({**BOX, "image_id": [20]}, "its image_id is [20]: expected"),
    ({**BOX, "image_id": True}, "its image_id is True: expected"),
    ({**BOX, "image_id": float("nan")}, "its image_id is nan: expected"),
    (lacking("category_id"), "it has no category_id: expected one of the ground truth's categories."),
    ({**BOX, "category_id": 4}, "its category_id is 4: expected one of the ground truth's categories."),
    ({**BOX, "category_id": None}, "it has no category_id"),
    (lacking("score"), "it has no score: expected a finite number."),
    ({**BOX, "score": float("nan")}, "its score is nan: expected a finite number."),
    ({**BOX, "score": float("inf")}, "its score is inf: expected a finite number."),
    ({**BOX, "score": 10**400}, "expected a finite number."),
    ({**BOX, "score": "0.5"}, "its score is '0.5': expected a finite number."),
    ({**BOX, "score": True}, "its score is True: expected a finite number."),
    ({**BOX, "bbox": [1, 2, 3]}, "its bbox is [1, 2, 3]: expected finite x, y, width, height"),
    ({**BOX, "bbox": [1, 2, 3, None]}, "its bbox is [1, 2, 3, None]: expected finite"),
    ({**BOX, "bbox": [1, 2, 3, float("-inf")]}, "its bbox is [1, 2, 3, -inf]: expected finite"),
    ({**BOX, "bbox": "1 2 3 4"}, "its bbox is '1 2 3 4': expected finite"),
    ({**BOX, "bbox": 0}, "its bbox is 0: expected finite"),
    (
        {**BOX, "bbox": [5, 2, -3, 1]},
        "its bbox is [5, 2, -3, 1]: expected finite x, y, width, height",
    ),
    (
        {**BOX, "bbox": [5, 2, 3, -0.1]},
        "its bbox is [5, 2, 3, -0.1]: expected finite x, y, width, height",
    ),
    (lacking("bbox"), "there is neither a bbox nor a segmentation."),
    ({**BOX, "bbox": [], "segmentation": None}, "there is neither a bbox nor a segmentation."),
]
# All that can be wrong with a mask is in the tests of annotations, which have masks as well.
WRONG_MASKS: list[tuple[Any, str]] = [
    (masked(size=[6, 4]), "the size in its segmentation is [6, 4]: expected its image's, [4, 6]."),
    ({**MASK, "segmentation": "57<"}, "its segmentation is '57<': expected a list of polygons, or an object"),
    (masked(counts="zzz"), "the counts in its segmentation are 'zzz': expected run lengths"),
    (masked(counts="5\u20ac"), "the counts in its segmentation are '5€': expected run lengths"),
    (masked(counts="57"), "the counts in its segmentation are '57', which sum to 12: expected numbers"),
    (
        masked(counts=[5, 7, 13]),
        "are [5, 7, 13], which sum to 25: expected numbers from 0 on that sum to 4 * 6",
    ),
    (masked(counts=[5, -7, 26]), "are [5, -7, 26], which sum to 24: expected numbers from 0 on"),
    (polygon(1, 1, 3, 3), "segmentation[1] is [1, 1, 3, 3] (of length 4): expected 6 coordinates"),
    (polygon(1, 1, 1e9, 3, 2, 2), "segmentation[1][2] is 1000000000.0: expected"),
    (polygon(1, 1, float("nan"), 3, 2, 2), "segmentation[1][2] is nan: expected"),
    (BOX, "only one of this entry and the first has a segmentation: give all entries one, or none."),
]


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [*((BOX, *case) for case in WRONG), *((MASK, *case) for case in WRONG_MASKS)],
)
def test_a_wrong_entry_is_named(tmp_path: Path, right: Any, wrong: Any, message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, [right, right, wrong, right])
    assert str(raised.value).startswith(f"{tmp_path / 'found.json'}, entry 3 of 4: ")
    assert message in str(raised.value)
    assert len(str(raised.value)) < len(str(tmp_path)) + 300


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{]", r"is not valid JSON, or is truncated: .* at line 1, column 3"),
        ("[\n1,\n2", r"is not valid JSON, or is truncated: .* at line 3, column 2"),
        ("", r"is not valid JSON, or is truncated: .* at line 1, column 1"),
        ("[" * 100_000, "is not valid JSON: "),
        ('{"annotations": []}', r"contains {'annotations': \[\]}: expected a list of detections"),
        ("null", "contains None: expected a list"),
    ],
)
def test_a_file_that_is_no_list_is_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"found\.json {message}"):
        read(tmp_path, content)


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(bytes(range(128, 256)))
    with pytest.raises(SettingsError, match=r"photo\.jpg is not valid JSON"):
        read_detections(tmp_path / "photo.jpg", TRUTH)
    with pytest.raises(SettingsError, match=r"none\.json cannot be read: No such file or directory\."):
        read_detections(tmp_path / "none.json", TRUTH)
    with pytest.raises(SettingsError, match=r"cannot be read: Is a directory\."):
        read_detections(tmp_path, TRUTH)


def test_what_is_read_can_be_scored(tmp_path: Path) -> None:
    annotation = {"id": 1, "image_id": 20, "category_id": 3, "bbox": [1, 0, 2, 4], "area": 7, "iscrowd": 0}
    truth = {**TRUTH, "annotations": [{**annotation, "segmentation": RLE}]}
    for segmentation in (RLE, {"size": [4, 6], "counts": [5, 7, 12]}):
        found = read(tmp_path, [{**MASK, "segmentation": segmentation}])
        assert set(coco_scores(truth, found).values()) == {100.0}


def test_many_entries_are_read_alike(tmp_path: Path) -> None:
    """A hundredth of what a detector finds in COCO's 5,000 images."""
    noise = np.random.default_rng(0).random((480, 640)) < 0.0003
    rle = coco_mask.encode(np.asfortranarray(noise.astype(np.uint8)))
    segmentation = {"size": [480, 640], "counts": rle["counts"].decode()}
    truth = {**TRUTH, "images": [{"id": n, "height": 480, "width": 640} for n in range(50)]}
    found = [{**BOX, "image_id": n % 50, "segmentation": segmentation} for n in range(5_000)]
    write_detections(tmp_path / "many.json", found)
    assert read_detections(tmp_path / "many.json", truth) == found
