"""Annotations in COCO's format: every mistake is named, with its entry."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from small_coco import SQUARE, Content, read, small, written

from polynl.errors import SettingsError
from polynl.tasks.coco.annotations import only, read_annotations

GONE = object()
NAN, INF = math.nan, math.inf
FIELDS: dict[tuple[str, int, str], list[Any]] = {
    ("images", 1, "id"): [GONE, "two", True, None],
    ("images", 1, "file_name"): [GONE, 3, ""],
    ("images", 1, "width"): [GONE, "12", 0, None],
    ("images", 2, "height"): [GONE, -3, 10.5],
    ("categories", 0, "id"): [GONE, "car", 1.0],
    ("categories", 1, "name"): [GONE, None, 5],
    ("annotations", 3, "id"): [GONE, "x"],
    ("annotations", 3, "image_id"): [GONE, 8, [7], "7"],
    ("annotations", 3, "category_id"): [GONE, 4, None],
    ("annotations", 2, "bbox"): [GONE, "1234", [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, None], [1, True, 3, 4]],
    ("annotations", 1, "bbox"): [[1, NAN, 3, 4], [1, 2, 3, INF], [-INF, 2, 3, 4], [1, 2, 3, 10**15]],
    ("annotations", 0, "iscrowd"): ["no", 2, None],
    ("annotations", 0, "area"): [-1.5, NAN, INF, "12", None],
    ("annotations", 1, "segmentation"): [GONE, "x", [], None],
}
CASES = [(*where, value) for where, values in FIELDS.items() for value in values]


def message(root: Path, content: Content) -> str:
    with pytest.raises(SettingsError) as caught:
        read(root, content)
    words = str(caught.value)
    file = str(root / "instances_small.json")
    assert words.startswith(file)
    assert len(words) < 400
    return words.removeprefix(file)


@pytest.mark.parametrize(("kind", "place", "key", "value"), CASES)
def test_a_wrong_field_is_told_with_its_entry(
    tmp_path: Path, kind: str, place: int, key: str, value: Any
) -> None:
    content = small()
    entry = content[kind][place]
    entry.pop(key) if value is GONE else entry.update({key: value})
    number = f" (id {entry['id']!r})" if "id" in entry else ""
    found = f"it has no {key}" if value is GONE else f"its {key} is {value!r}"
    assert message(tmp_path, content).startswith(f": {kind}[{place}]{number}: {found}: expected ")


LONG = [float(number) for number in range(400)]
SHAPES: list[tuple[Any, str]] = [
    (SQUARE[0], "segmentation[0] is 2: expected"),
    ([[1, 2, 3, 4]], "segmentation[0] is [1, 2, 3, 4] (of length 4): expected"),
    ([*SQUARE, LONG[:7]], "segmentation[1] is [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0] (of length 7): expected"),
    ([*SQUARE, [*LONG, NAN, 5]], "segmentation[1][400] is nan: expected"),
    ([[*LONG, 5, -INF]], "segmentation[0][401] is -inf: expected"),
    ([[*LONG, "5", 5]], "segmentation[0][400] is '5': expected"),
    ([[0, 0, 1e9, 0, 5, 5]], "segmentation[0][2] is 1000000000.0: expected"),
    ([[0, 0, 5, 0, -1e9, 5]], "segmentation[0][4] is -1000000000.0: expected"),
    ({"counts": [120]}, "the size in its segmentation is None: expected"),
    ({"size": [12, 10], "counts": [120]}, "the size in its segmentation is [12, 10]: expected"),
    ({"size": [10.0, 12], "counts": [120]}, "the size in its segmentation is [10.0, 12]: expected"),
    ({"size": [10, 12]}, "the counts in its segmentation are None: expected"),
    ({"size": [10, 12], "counts": [1.5, 118.5]}, "the counts in its segmentation are [1.5, 118.5]: expected"),
    ({"size": [10, 12], "counts": [60, 59]}, "are [60, 59], which sum to 119: expected"),
    ({"size": [10, 12], "counts": [125, -5]}, "are [125, -5], which sum to 120: expected"),
    ({"size": [10, 12], "counts": []}, "are [], which sum to 0: expected"),
    (
        {"size": [10, 12], "counts": "l1 1"},
        "are 'l1 1', which sum to 108: expected",
    ),
    ({"size": [10, 12], "counts": "l1l"}, "the counts in its segmentation are 'l1l': expected"),
    ({"size": [10, 12], "counts": "l1k1"}, "are 'l1k1', which sum to 119: expected"),
    ({"size": [10, 12], "counts": ""}, "the counts in its segmentation are '': expected"),
]


@pytest.mark.parametrize(("value", "expected"), SHAPES)
def test_a_wrong_shape_is_told_with_its_entry(tmp_path: Path, value: Any, expected: str) -> None:
    content = small()
    content["annotations"][1]["segmentation"] = value
    words = message(tmp_path, content)
    assert words.startswith(": annotations[1] (id 12): ")
    assert expected in words


def test_ids_are_unique_and_lists_are_there(tmp_path: Path) -> None:
    for kind, first, last in (("images", 0, 2), ("annotations", 1, 3), ("categories", 0, 1)):
        content = small()
        number = content[kind][last]["id"] = content[kind][first]["id"]
        expected = f": {kind}[{last}] (id {number}): {kind}[{first}] has the same id."
        assert message(tmp_path, content) == expected
        assert message(tmp_path, small() | {kind: [5]}).startswith(f": {kind}[0]: it is 5: expected")
        assert message(tmp_path, small() | {kind: {"id": 1}}).startswith(f": its {kind} is {{'id': 1}}: ")
        del content[kind]
        assert message(tmp_path, content).startswith(f": it has no {kind}: expected a list")


OUTSIDE = ["/a.png", "../a.png", "below/../../a.png", "..", "C:a.png", "c:/a.png", "a\0.png"]
OUTSIDE += [r"..\a.png", r"below\..\..\a.png", r"\a.png", r"\\host\a.png", r"C:\a.png"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    content = small()
    content["images"][1]["file_name"] = name
    expected = f": images[1] (id 2): its file_name is {name!r}: expected a path"
    assert message(tmp_path, content).startswith(expected)


def test_names_that_stay_in_the_folder_are_fine(tmp_path: Path) -> None:
    content = small()
    for image, name in zip(content["images"], ("./below/a.png", "b..c.png", "linked//d.png"), strict=True):
        image["file_name"] = name
    file = written(tmp_path, content)
    images, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (images / "linked").symlink_to(elsewhere)
    (images / "b.png").rename(images / "b..c.png")
    (images / "c.png").rename(elsewhere / "d.png")
    assert read_annotations(file, images).content["images"] == content["images"]


def test_images_that_are_not_there_are_counted_and_some_named(tmp_path: Path) -> None:
    file, images = written(tmp_path, small()), tmp_path / "images"
    (images / "c.png").unlink()
    with pytest.raises(SettingsError) as caught:
        read_annotations(file, images)
    assert str(caught.value) == f"{file}: 1 of 3 images are not in {images}: c.png."
    content = small()
    content["images"] += [
        {**content["images"][0], "id": n, "file_name": f"no/{n}.png"} for n in range(100, 105)
    ]
    with pytest.raises(SettingsError) as caught:
        read_annotations(written(tmp_path, content), images)
    assert str(caught.value).endswith(
        ": 5 of 8 images are not in " + f"{images}: no/100.png, no/101.png, no/102.png and 2 more."
    )
    with pytest.raises(SettingsError, match=r"/nowhere of images cannot be read: No such file"):
        read_annotations(file, tmp_path / "nowhere")


NO_JSON = [
    (b"", "Expecting value at line 1, column 1."),
    (b'{"images": [],\n "annotations": [{"id', "Unterminated string starting at line 2, column 19."),
    (b"[" * 100_000, "is not valid JSON: "),
    (b'{"images": "\xff"}', "is not valid JSON: 'utf-8' codec can't decode"),
    (b"[1, 2]", ": it is [1, 2]: expected an object with images, "),
]


@pytest.mark.parametrize(("text", "expected"), NO_JSON, ids=["empty", "cut", "deep", "no text", "list"])
def test_what_is_no_json_is_told_with_its_place(tmp_path: Path, text: bytes, expected: str) -> None:
    file = tmp_path / "instances_small.json"
    file.write_bytes(text)
    with pytest.raises(SettingsError) as caught:
        read_annotations(file, tmp_path)
    assert str(caught.value).startswith(str(file))
    assert expected in str(caught.value)
    with pytest.raises(SettingsError, match=r"gone\.json cannot be read: No such file or directory\.$"):
        read_annotations(tmp_path / "gone.json", tmp_path)


# Some categories


def test_some_categories_and_all_images(tmp_path: Path) -> None:
    everything = read(tmp_path, small())
    cars = only(everything, ["car"])
    assert cars.categories == {3: "car"}
    assert [entry["id"] for entry in cars.content["annotations"]] == [11, 13, 14]
    assert cars.content["categories"] == [{"id": 3, "name": "car"}]
    assert cars.content["images"] == everything.content["images"]
    assert len(everything.content["annotations"]) == 4
    assert only(everything, ["toothbrush", "car"]).categories == everything.categories


def test_a_category_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no category 'tothbrush'\. Did you mean toothbrush\?"):
        only(read(tmp_path, small()), ["car", "tothbrush"])
