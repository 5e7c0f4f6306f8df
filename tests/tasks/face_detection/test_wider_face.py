"""WIDER FACE: read as its files say, every mistake named with its line."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polynl.data.images import Unreadable, UnreadableImageError, read_image
from polynl.errors import SettingsError
from polynl.tasks.face_detection.data import FaceImage, FaceImages, counts, event_and_name, read_faces
from polynl.tasks.face_detection.transforms import FacePatch, PatchConfig

DATA = os.environ.get("POLYNL_DATA")
WIDTH, HEIGHT = 40, 30
A, B, C = "0--Parade/0_Parade_a_1.jpg", "0--Parade/0_Parade_b_2.jpg", "20--Family_Group/20_c_3.jpg"
# Lines of faces end with a space, and a line of zeros stands for no faces: so it is officially.
SMALL = "\n".join(
    [
        *(A, "2", "5 6 10 12 0 0 0 0 0 0 ", "20 1 7.5 9 2 0 1 1 2 0 "),
        *(B, "0", "0 0 0 0 0 0 0 0 0 0 "),
        *(C, "4", "3 4 0 5 0 0 0 0 0 0 ", "30 20 15 20 0 0 0 0 0 0 ", "60 4 5 5 0 0 0 0 0 0 ", "1 2 3 4", ""),
    ]
)


def written(root: Path, text: str = SMALL, names: tuple[str, ...] = (A, B, C)) -> tuple[Path, Path]:
    for number, name in enumerate(names):
        path = root / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    file = root / "wider_face_small_bbx_gt.txt"
    file.write_text(text, encoding="utf-8")
    return file, root / "images"


def dataset(root: Path, *, training: bool = True, text: str = SMALL, **options: Any) -> FaceImages:
    file, folder = written(root, text)
    return FaceImages(
        read_faces(file, folder), folder, training=training, **{"on_bad_image": "stop", **options}
    )


def sample(data: FaceImages, index: int) -> tuple[torch.Tensor, dict[str, Any]]:
    found = data[index]
    assert not isinstance(found, Unreadable)
    return found


# What is read


def test_a_file_by_hand(tmp_path: Path) -> None:
    faces = read_faces(*written(tmp_path))
    assert [image.name for image in faces] == [A, B, C]
    assert [image.boxes.tolist() for image in faces] == [
        [[5, 6, 10, 12], [20, 1, 7.5, 9]],
        [],
        [[3, 4, 0, 5], [30, 20, 15, 20], [60, 4, 5, 5], [1, 2, 3, 4]],
    ]
    assert [image.invalid.tolist() for image in faces] == [[False, True], [], [False] * 4]
    assert [image.usable.tolist() for image in faces] == [[True, False], [], [False, True, True, True]]
    assert faces[1].boxes.shape == (0, 4)
    for image in faces:
        assert (image.boxes.dtype, image.invalid.dtype) == (torch.float32, torch.bool)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace(" \n", "\n").rstrip(),
        lambda text: text.replace("0 0 0 0 0 0 0 0 0 0 \n", ""),
        lambda text: text.replace("\n20--", "\n\n20--") + "\n \n",
    ],
    ids=["other line ends", "mark of UTF-8", "no space at ends", "no line of zeros", "blank lines"],
)
def test_what_editors_and_others_make_of_a_file_is_read_alike(tmp_path: Path, change: Any) -> None:
    plain = read_faces(*written(tmp_path))
    assert change(SMALL) != SMALL
    changed = read_faces(*written(tmp_path, change(SMALL)))
    for one, other in zip(plain, changed, strict=True):
        assert one.name == other.name
        assert torch.equal(one.boxes, other.boxes)
        assert torch.equal(one.invalid, other.invalid)


def test_faces_left_out_are_counted(tmp_path: Path) -> None:
    text = SMALL.replace("3 4 0 5 0 0 0 0", "3 4 0 5 0 0 0 1").replace("60 4 5 5", "60 4 5 0")
    faces = read_faces(*written(tmp_path, text))
    assert sum(int(image.usable.sum()) for image in faces) == 3
    expected = "3 images with 6 faces, of which 2 are flagged invalid and 1 have no width or height"
    assert counts(faces) == expected


def test_a_large_file_is_read_whole(tmp_path: Path) -> None:
    """WIDER FACE has four times as many faces."""
    names = [f"{number % 9}--Event/{number}.jpg" for number in range(400)]
    line = "449 330 122 149 0 0 0 0 0 0 \n"
    file, folder = written(tmp_path, "".join(f"{name}\n100\n{line * 100}" for name in names))
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    faces = read_faces(file, folder)
    assert sum(len(image.boxes) for image in faces) == 40_000


# Mistakes


def message(root: Path, text: str) -> str:
    file, folder = written(root, text)
    with pytest.raises(SettingsError) as caught:
        read_faces(file, folder)
    words = str(caught.value)
    assert words.startswith(f"{file}")
    assert len(words.removeprefix(str(file))) < 500
    return words.removeprefix(str(file))


FACE = "5 6 10 12 0 0 0 0 0 0"
NO_NAME = "is not the name of an image: expected a path such as 0--Parade/0_Parade_1.jpg"
NO_COUNT = f"is not a number of faces, for {A!r}: expected a whole number."
NO_FACE = f"for {A!r}: expected x y w h and up to six attributes, finite numbers"
ALL = "Is the file truncated?"
MISTAKES: list[tuple[str, str]] = [
    ("", " has no image."),
    ("\n\n", " has no image."),
    (f"photo\n1\n{FACE}", f", line 1: 'photo' {NO_NAME}."),
    (f"{FACE}\n", f", line 1: {FACE!r} {NO_NAME}."),
    (f"{A}\n1\n{FACE}\nfolder/b\n", f", line 4: 'folder/b' {NO_NAME}."),
    (f"{A}\none\n{FACE}\n", f", line 2: 'one' {NO_COUNT}"),
    (f"{A}\n-1\n{FACE}\n", f", line 2: '-1' {NO_COUNT}"),
    (f"{A}\n1.0\n{FACE}\n", f", line 2: '1.0' {NO_COUNT}"),
    (f"{A}\n²\n{FACE}\n", f", line 2: '²' {NO_COUNT}"),
    (f"{A}\n{'9' * 5000}\n{FACE}\n", f"99' {NO_COUNT}"),
    (f"{A}\n{B}\n1\n{FACE}\n", f", line 2: {B!r} {NO_COUNT}"),
    (f"{A}\n{FACE}\n", f", line 2: {FACE!r} {NO_COUNT}"),
    (f"{A}", f", line 1: '' {NO_COUNT}"),
    (f"{A}\n3\n{FACE}\n{FACE}\n", f", line 2: {A!r} has 3 faces, but only 2 lines follow. {ALL}"),
    (
        f"{A}\n3\n{FACE}\n{FACE}\n{B}\n1\n{FACE}\n",
        f", line 5: {B!r} is not a face, 3 of 3 {NO_FACE}",
    ),
    (
        f"{A}\n1\n{FACE}\n{FACE}\n{B}\n1\n{FACE}\n",
        f", line 4: {FACE!r} {NO_NAME}; or {A!r} on line 1 has more faces than its count says.",
    ),
    (
        f"{A}\n0\n{FACE}\n{B}\n1\n{FACE}\n",
        f", line 3: {FACE!r} {NO_NAME}; or {A!r} on line 1 has more faces than its count says.",
    ),
    (f"{A}\n2\n{FACE}\n5 6 10\n", f", line 4: '5 6 10' is not a face, 2 of 2 {NO_FACE}"),
    (
        f"{A}\n2\n5 6 10 wide 0 0\n{FACE}\n",
        f", line 3: '5 6 10 wide 0 0' is not a face, 1 of 2 {NO_FACE}",
    ),
    (f"{A}\n1\n5,6,10,12\n", f", line 3: '5,6,10,12' is not a face, 1 of 1 {NO_FACE}"),
    (
        f"{A}\n1\n5 6 10 12 0 0 0 no 0 0\n",
        f", line 3: '5 6 10 12 0 0 0 no 0 0' is not a face, 1 of 1 {NO_FACE}",
    ),
    (f"{A}\n1\nnan 6 10 12\n", f", line 3: 'nan 6 10 12' is not a face, 1 of 1 {NO_FACE}"),
    (f"{A}\n1\n5 6 10 nan\n", f", line 3: '5 6 10 nan' is not a face, 1 of 1 {NO_FACE}"),
    (f"{A}\n1\n5 6 inf 12\n", f", line 3: '5 6 inf 12' is not a face, 1 of 1 {NO_FACE}"),
    (f"{A}\n1\n5 -inf 1 12\n", f", line 3: '5 -inf 1 12' is not a face, 1 of 1 {NO_FACE}"),
    (f"{A}\n1\n5 6 1e30 12\n", f", line 3: '5 6 1e30 12' is not a face, 1 of 1 {NO_FACE}"),
    (
        f"{A}\n0\n{B}\n0\n{A}\n1\n{FACE}\n",
        f", line 5: {A!r} is already on line 1: remove one of the two.",
    ),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    words = message(tmp_path, text)
    if expected.endswith("."):
        assert words.endswith(expected)
    else:
        assert expected in words


OUTSIDE = ["/a.jpg", "../a.jpg", "0--Parade/../../a.jpg", "C:a.jpg", r"..\a.jpg", r"\\host\a.jpg", "a\0.jpg"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    expected = f", line 4: {name!r}: expected a path that is relative to the folder and stays in it."
    assert message(tmp_path, f"{A}\n1\n{FACE}\n{name}\n0\n") == expected


def test_missing_images_are_counted_and_some_of_them_named(tmp_path: Path) -> None:
    names = [f"9--None/{number}.jpg" for number in range(5)]
    folder = tmp_path / "images"
    text = SMALL + "".join(f"{name}\n0\n" for name in names)
    expected = f": 5 of 8 images are not in {folder}: {', '.join(names[:3])} and 2 more."
    assert message(tmp_path, text) == expected
    (folder / "9--None").mkdir()
    (folder / names[0]).mkdir()
    assert message(tmp_path, text) == expected, "a folder is no image"
    one = SMALL + f"{names[1]}\n0\n"
    assert message(tmp_path, one) == f": 1 of 4 images are not in {folder}: {names[1]}."


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    file, folder = written(tmp_path)
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(SettingsError) as caught:
            read_faces(path, folder)
        assert str(caught.value).startswith(f"{path} cannot be read: ")
        assert "wider_face_split.zip" in str(caught.value)
    file.write_bytes(f"{A}\n1\n".encode() + b"\xff\xfe 3\n")
    with pytest.raises(SettingsError, match=r"gt\.txt, line 3: byte 0xff is not UTF-8; save"):
        read_faces(file, folder)
    file.write_text("a.jpg\n0\n")
    with pytest.raises(SettingsError, match=r"nowhere of images cannot be read: No such file"):
        read_faces(file, tmp_path / "nowhere")


# Samples


def test_samples_to_train_on(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    assert len(data) == 3
    assert data.names == [A, B, C]
    expected = [[[5, 6, 15, 18]], [], [[30, 20, WIDTH, HEIGHT], [1, 2, 4, 6]]]
    for index, boxes in enumerate(expected):
        image, target = sample(data, index)
        assert torch.equal(image, read_image(tmp_path / "images" / data.names[index]))
        assert target.keys() == {"image_id", "name", "boxes", "labels"}
        assert (target["image_id"], target["name"]) == (index, data.names[index])
        assert target["boxes"].tolist() == boxes, "usable, in the image, clipped to it"
        assert target["boxes"].shape == (len(boxes), 4)
        assert target["labels"].tolist() == [1] * len(boxes)
        assert (target["boxes"].dtype, target["labels"].dtype) == (torch.float32, torch.int64)


def test_samples_to_score_on(tmp_path: Path) -> None:
    data = dataset(tmp_path, training=False)
    image, target = sample(data, -1)
    assert target == {"image_id": 2, "name": C}
    assert image.shape == (3, HEIGHT, WIDTH)
    with pytest.raises(IndexError):
        data[3]


def test_images_without_a_face_are_trained_on(tmp_path: Path) -> None:
    data = dataset(tmp_path, transform=FacePatch(PatchConfig(size=16)))
    image, target = sample(data, 1)
    assert image.shape == (3, 16, 16)
    assert (target["boxes"].shape, target["labels"].shape) == ((0, 4), (0,))
    none = dataset(tmp_path, text=f"{A}\n0\n{B}\n1\n5 6 0 0\n{C}\n1\n1 1 5 5 0 0 0 1 0 0\n")
    assert [len(sample(none, index)[1]["boxes"]) for index in range(3)] == [0, 0, 0]


def test_an_image_with_thousands_of_faces(tmp_path: Path) -> None:
    faces = "".join(f"{number % 36} {number % 27} 3 3 2 0 0 0 0 0\n" for number in range(1968))
    text = f"{A}\n1968\n{faces}"
    _, target = sample(dataset(tmp_path, text=text), 0)
    assert target["boxes"].shape == (1968, 4)
    patch = FacePatch(PatchConfig(size=64, scale=(1.0, 1.0)), flip=0.0)
    _, target = sample(dataset(tmp_path, text=text, transform=patch), 0)
    assert 1000 < len(target["boxes"]) == len(target["labels"]) < 1968


@pytest.mark.parametrize("training", [True, False])
def test_a_bad_image_stops_or_is_stood_in_for(tmp_path: Path, training: bool) -> None:
    stopping = dataset(tmp_path, training=training)
    skipping = dataset(tmp_path, training=training, on_bad_image="skip")
    path = tmp_path / "images" / B
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UnreadableImageError) as caught:
        stopping[1]
    first, hint = str(caught.value).splitlines()
    assert first.startswith(f"{path} is not a readable image: ")
    assert "--data.on-bad-image skip" in hint
    assert skipping[1] == Unreadable(str(path), first)
    path.write_bytes(b"")


def test_workers_are_handed_few_tensors() -> None:
    """Each is an open file where processes are spawned."""
    faces = [FaceImage(f"{n}.jpg", torch.ones(2, 4), torch.zeros(2, dtype=torch.bool)) for n in range(3000)]
    data = FaceImages(faces, "nowhere", training=True, on_bad_image="skip")
    assert pickle.dumps(data).count(b"_rebuild_tensor_v2") == 1
    assert len(pickle.dumps(data)) < 200_000


def test_names_are_those_of_the_official_evaluation() -> None:
    assert event_and_name(C) == ("20--Family_Group", "20_c_3")
    assert event_and_name("a.b.png") == (".", "a.b")


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with images of WIDER FACE")
@pytest.mark.parametrize(
    ("split", "images", "faces", "invalid"), [("train", 400, 2290, 3), ("val", 200, 2352, 84)]
)
def test_real_images(split: str, images: int, faces: int, invalid: int) -> None:
    root = Path(str(DATA), "widerface-half")
    folder = root / f"WIDER_{split}" / "images"
    read = read_faces(root / f"wider_face_{split}_bbx_gt.txt", folder)
    expected = f"{images} images with {faces:,} faces, of which {invalid} are flagged invalid and 0 have no"
    assert counts(read).startswith(expected)
    data = FaceImages(read, folder, training=True, on_bad_image="stop")
    assert len(data) == images
    for index in range(0, images, 25):
        image, target = sample(data, index)
        assert image.shape[0] == 3
        edges = torch.tensor([image.shape[2], image.shape[1]])
        assert len(target["boxes"]) == read[index].usable.sum()
        assert (target["boxes"][:, 2:] <= edges).all()
