"""Scenes with faces: the same for the same seed, of all sizes, and truthful about where the faces are."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polynl.tasks.face_detection import scenes as face_scenes
from polynl.tasks.face_detection.data import event_and_name
from polynl.tasks.face_detection.metric import SUBSETS
from polynl.tasks.face_detection.scenes import CHUNK, EVENTS, LEAST_HEIGHTS, SMALLEST, FaceScenes
from polynl.tasks.face_detection.transforms import FacePatch, PatchConfig

SIZE = 96


def scenes(count: int = 40, *, training: bool = True, **options: Any) -> FaceScenes:
    return FaceScenes(count, training=training, **{"size": SIZE, "split": "train", "seed": 0, **options})


@pytest.fixture(scope="module")
def drawn() -> FaceScenes:
    return scenes(CHUNK)


def all_faces(data: FaceScenes) -> list[Any]:
    return [SimpleNamespace(name=name, boxes=data.boxes(at)) for at, name in enumerate(data.names)]


def faces_of(data: FaceScenes, event: str) -> list[Any]:
    return [image for image in all_faces(data) if event_and_name(image.name)[0] == event]


# Samples


def test_samples_are_those_of_images_on_disk(drawn: FaceScenes) -> None:
    assert len(drawn) == CHUNK == len(set(drawn.names))
    for index, faces in enumerate(all_faces(drawn)):
        image, target = drawn[index]
        assert (image.shape, image.dtype) == ((3, SIZE, SIZE), torch.uint8)
        assert target.keys() == {"image_id", "name", "boxes", "labels"}
        assert (target["image_id"], target["name"]) == (index, faces.name)
        assert torch.equal(target["boxes"][:, :2], faces.boxes[:, :2])
        assert torch.allclose(target["boxes"][:, 2:], faces.boxes[:, :2] + faces.boxes[:, 2:], atol=1e-4)
        assert target["labels"].tolist() == [1] * len(faces.boxes)
    _, target = scenes(3, training=False)[-1]
    assert target == {"image_id": 2, "name": drawn.names[2]}
    with pytest.raises(IndexError):
        drawn[CHUNK]


def test_a_transform_changes_samples_and_leaves_the_scenes(drawn: FaceScenes) -> None:
    mirrored = scenes(transform=FacePatch(PatchConfig(size=SIZE, scale=(1.0, 1.0), distort=0.0), flip=1.0))
    index = next(index for index in range(40) if len(drawn[index][1]["boxes"]))
    (image, target), (other, changed) = drawn[index], mirrored[index]
    assert torch.equal(other, image.flip(2))
    assert torch.allclose(changed["boxes"][:, [2, 0]], SIZE - target["boxes"][:, [0, 2]], atol=1e-4)
    assert torch.equal(mirrored.images, drawn.images[:40])


def test_workers_are_handed_few_tensors(drawn: FaceScenes) -> None:
    assert pickle.dumps(drawn).count(b"_rebuild_tensor_v2") == 1
    few, many = pickle.dumps(scenes(2)), pickle.dumps(drawn)
    assert len(many) < len(few) + (CHUNK - 2) * (3 * SIZE**2 + 2000)


@pytest.mark.parametrize("options", [{"count": 0}, {"size": 31}])
def test_too_few_and_too_small_ones_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"expected at least 1 scene, and 32 pixels"):
        scenes(**options)
    assert len(scenes(1, size=32)) == 1


# Seeds


def test_a_scene_depends_on_its_number_and_not_on_how_many_there_are(drawn: FaceScenes) -> None:
    for count in (1, 13, CHUNK + 3):
        some = scenes(count)
        both = min(count, CHUNK)
        assert torch.equal(some.images[:both], drawn.images[:both])
        assert some.names[:both] == drawn.names[:both]
        for one, other in zip(all_faces(some)[:both], all_faces(drawn)[:both], strict=True):
            assert torch.equal(one.boxes, other.boxes)


def test_seeds_splits_and_chunks_differ() -> None:
    some = scenes(CHUNK + 1)
    others = [some.images[CHUNK], *(scenes(1, **one).images[0] for one in ({"seed": 1}, {"split": "val"}))]
    pictures = [some.images[0], *others]
    assert len({picture.numpy().tobytes() for picture in pictures}) == 4
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(scenes(1).images[0], some.images[0])
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the global generator"


# Faces


def test_every_kind_of_scene_is_there(drawn: FaceScenes) -> None:
    for event in EVENTS:
        of_event = faces_of(drawn, event.name)
        assert event.share * CHUNK / 3 < len(of_event) < event.share * CHUNK * 2 + 5
        assert all(len(image.boxes) <= event.faces[1] for image in of_event)
    assert max(len(image.boxes) for image in all_faces(drawn)) >= 24, "dozens"
    assert all(len(image.boxes) == 0 for image in faces_of(drawn, "3--Empty"))
    assert all(len(image.boxes) for image in all_faces(drawn) if "Empty" not in image.name)


@pytest.mark.parametrize("size", [32, 64, 256])
def test_faces_are_whole_and_of_many_scales(size: int) -> None:
    boxes = torch.cat([image.boxes for image in all_faces(scenes(30, size=size))])
    assert boxes[:, :2].min() > -1e-3
    assert (boxes[:, :2] + boxes[:, 2:]).max() < size + 1e-3
    heights, ratios = boxes[:, 3], boxes[:, 3] / boxes[:, 2]
    assert 0.95 * SMALLEST < heights.min() < 5.5
    assert heights.max() > 0.35 * size
    assert 1.0 < ratios.min() < ratios.max() < 1.5
    assert 1.15 < ratios.mean() < 1.35


def test_faces_hardly_hide_each_other(drawn: FaceScenes) -> None:
    for image in all_faces(drawn):
        low, high = image.boxes[:, :2], image.boxes[:, :2] + image.boxes[:, 2:]
        common = (high[:, None].minimum(high) - low[:, None].maximum(low)).clamp(min=0).prod(2)
        areas = image.boxes[:, 2:].prod(1)
        share = common / areas[:, None].minimum(areas)
        assert (share.fill_diagonal_(0) <= 0.2 + 1e-4).all()


def test_boxes_are_where_the_faces_are_painted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With faces and without, the same scenes differ in the boxes, up to their edges, and nowhere else."""
    with_faces = scenes(30, split="val")
    paint = face_scenes._paint

    def paint_no_faces(pictures: torch.Tensor, items: face_scenes.Items) -> None:
        paint(pictures, items[items.kinds != face_scenes._FACE])

    monkeypatch.setattr(face_scenes, "_paint", paint_no_faces)
    changed = (with_faces.images != scenes(30, split="val").images).any(1)
    for index, image in enumerate(all_faces(with_faces)):
        inside = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        for left, top, width, height in image.boxes.tolist():
            rows, columns = slice(int(top), int(top + height) + 1), slice(int(left), int(left + width) + 1)
            inside[rows, columns] = True
            there = changed[index, rows, columns]
            assert there.any(0).float().mean() > 0.7, "from left to right"
            assert there.any(1).float().mean() > 0.7, "from top to bottom"
        assert not changed[index][~inside].any()


def test_faces_have_eyes() -> None:
    """Darker than the cheek below; a head is turned by up to 0.3, so that an eye may be above or below."""
    data = scenes(60, size=256)
    darker = []
    for image, faces in zip(data.images.float().mean(1), all_faces(data), strict=True):
        for left, top, width, height in faces.boxes[faces.boxes[:, 3] > 60].tolist():
            column = image[int(top) : int(top + height), int(left + 0.7 * width)]
            eye, cheek = column[int(0.35 * height) : int(0.55 * height)], column[int(0.67 * height)]
            darker.append(bool(eye.min() < 0.6 * cheek))
    assert len(darker) > 20
    assert sum(darker) > 0.8 * len(darker), sum(darker) / len(darker)


# What is scored


def test_the_ground_truth_is_of_all_faces_and_divides_them_by_height(drawn: FaceScenes) -> None:
    truth = drawn.ground_truth()
    assert list(truth) == [event_and_name(name) for name in drawn.names]
    assert list(LEAST_HEIGHTS) == list(SUBSETS) == ["easy", "medium", "hard"]
    for image in all_faces(drawn):
        key = event_and_name(image.name)
        found = truth[key].boxes
        assert list(truth[key].counted) == list(SUBSETS)
        assert found.shape == (len(image.boxes), 4)
        assert found.tolist() == image.boxes.tolist()
        counting = {subset: set(places.tolist()) for subset, places in truth[key].counted.items()}
        assert counting["easy"] <= counting["medium"] <= counting["hard"] <= set(range(len(found)))
        for subset, least in (("easy", 25), ("medium", 15), ("hard", 5)):
            assert counting[subset] == {place for place, box in enumerate(found.tolist()) if box[3] >= least}
    totals = [truth.count(subset) for subset in SUBSETS]
    faces = sum(len(faces.boxes) for faces in truth.values())
    assert 0 < totals[0] < totals[1] < totals[2] < faces, "the smallest never count"
