"""COCO's scores, against pycocotools' own evaluation of the same detections."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from polynl.errors import SettingsError
from polynl.tasks.coco.metric import coco_evaluation, coco_scores
from polynl.tasks.coco.outcomes import coco_outcomes, score_coco
from polynl.tasks.detections import Detections

# pycocotools has not followed NumPy 2 in decoding, which is done by tests only.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
BOX = [f"box_{name}" for name in NAMES]
MASK = [f"mask_{name}" for name in NAMES]
SIZE = (160, 200)
CATEGORIES = {3: "cat", 7: "dog", 4: "bird", 90: "never there"}


def ellipse(box: np.ndarray) -> dict[str, Any]:
    """The RLE of an ellipse in a box x, y, w, h."""
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]] + 0.5
    x, y, w, h = box
    inside = ((columns - x - w / 2) / (w / 2)) ** 2 + ((rows - y - h / 2) / (h / 2)) ** 2 <= 1
    rle = coco_mask.encode(np.asfortranarray(inside.astype(np.uint8)))
    return {"size": list(SIZE), "counts": rle["counts"].decode()}


def random_box(generator: np.random.Generator) -> np.ndarray:
    """Small, medium or large by COCO's measure, each as often."""
    low, high = [(8, 28), (40, 90), (110, 150)][generator.integers(3)]
    sides = generator.uniform(low, high, 2)
    return np.concatenate([generator.uniform(0, np.maximum(SIZE[::-1] - sides, 1)), sides])


def random_ground_truth(generator: np.random.Generator, images: int) -> dict[str, Any]:
    """Every fifth image is empty; there are crowds, polygons, and an unsorted list of categories."""
    annotations: list[dict[str, Any]] = []
    for image in range(images):
        for _ in range(0 if image % 5 == 0 else generator.integers(1, 7)):
            box, crowd = random_box(generator), int(generator.random() < 0.2)
            x, y, w, h = box.tolist()
            segmentation: Any = ellipse(box)
            area = int(coco_mask.area(segmentation))
            if generator.random() < 0.3:
                segmentation, area = [[x, y, x + w, y, x + w / 2, y + h]], w * h / 2
            annotations.append(
                {
                    "id": 5 + 3 * len(annotations),
                    "image_id": 100 - 2 * image,
                    "category_id": int(generator.choice([3, 7, 4])),
                    "bbox": [x, y, w, h],
                    "area": area,
                    "iscrowd": crowd,
                    "segmentation": segmentation,
                }
            )
    return {
        "images": [{"id": 100 - 2 * i, "height": SIZE[0], "width": SIZE[1]} for i in range(images)],
        "categories": [{"id": number, "name": name} for number, name in CATEGORIES.items()],
        "annotations": annotations,
    }


def random_detections(
    generator: np.random.Generator, truth: dict[str, Any], *, ties: bool
) -> list[dict[str, Any]]:
    """Objects found nearly where they are, twice, or as another category; and things that are not there."""
    boxes = []
    for annotation in truth["annotations"]:
        for _ in range(generator.integers(0, 4)):
            scale = generator.choice([0.01, 0.05, 0.2])
            box = np.array(annotation["bbox"])
            box = box + generator.normal(0, scale, 4) * np.tile(box[2:], 2)
            other = generator.random() < 0.1
            category = 7 if other else annotation["category_id"]
            boxes.append((annotation["image_id"], category, np.maximum(box, [-5, -5, 2, 2])))
    for image in truth["images"]:
        for _ in range(generator.integers(0, 4)):
            boxes.append((image["id"], int(generator.choice([3, 4, 7, 90])), random_box(generator)))
    for _ in range(130):
        boxes.append((truth["images"][1]["id"], 3, random_box(generator)))
    scores = generator.random(len(boxes)).round(1) if ties else generator.permutation(len(boxes)) / len(boxes)
    found = [
        {
            "image_id": image,
            "category_id": category,
            "score": float(score),
            "bbox": box.tolist(),
            # Not the box's ellipse, so that a box scored from the mask is seen.
            "segmentation": ellipse(box * [1, 1, 0.9, 1]),
        }
        for (image, category, box), score in zip(boxes, scores, strict=True)
    ]
    return [found[place] for place in generator.permutation(len(found))]


def official(
    truth: dict[str, Any], found: list[dict[str, Any]], kind: str, image_ids: list[int] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """pycocotools' scores in percent, and its AP of each category."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = copy.deepcopy(truth)
        coco.createIndex()
        results = coco.loadRes(copy.deepcopy(found))
        evaluation = COCOeval(coco, results, {"box": "bbox", "mask": "segm"}[kind])
        if image_ids is not None:
            evaluation.params.imgIds = image_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    scores = {f"{kind}_{n}": 100 * s for n, s in zip(NAMES, evaluation.stats, strict=False) if s > -1}
    precision = evaluation.eval["precision"][:, :, :, 0, 2]
    aps = {}
    for place, category in enumerate(sorted(CATEGORIES)):
        if (known := precision[:, :, place][precision[:, :, place] > -1]).size:
            aps[CATEGORIES[category]] = 100 * float(known.mean())
    return scores, aps


def without(found: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k != key} for one in found]


def scene(seed: int, *, ties: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    generator = np.random.default_rng(seed)
    truth = random_ground_truth(generator, 12)
    return truth, random_detections(generator, truth, ties=ties)


def assert_close(found: dict[str, float], expected: dict[str, float]) -> None:
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=1e-6, rel=0)


# Against pycocotools


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_pycocotools(
    seed: int, ties: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    truth, found = scene(seed, ties=ties)
    before = copy.deepcopy((truth, found))
    evaluation = coco_evaluation(truth, found)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]
    assert (truth, found) == before
    boxes, box_aps = official(truth, found, "box")
    masks, mask_aps = official(truth, without(found, "bbox"), "mask")
    assert list(boxes) == BOX
    assert list(masks) == MASK
    assert_close(evaluation.scores, boxes | masks)
    assert all(5 < evaluation.scores[f"{kind}_ap"] < 95 for kind in ("box", "mask")), "no trivial scores"
    assert list(evaluation.by_category) == list(box_aps) == ["cat", "bird", "dog"]
    for name, aps in evaluation.by_category.items():
        assert_close(aps, {"box_ap": box_aps[name], "mask_ap": mask_aps[name]})
    assert coco_scores(truth, found) == evaluation.scores


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_some_images_are_those_of_pycocotools(seed: int) -> None:
    truth, found = scene(seed)
    chosen = [98, 84, 90, 88, 96]
    expected = official(truth, found, "box", chosen)[0]
    expected |= official(truth, without(found, "bbox"), "mask", chosen)[0]
    assert_close(coco_scores(truth, found, iter(chosen)), expected)
    assert coco_scores(truth, found, reversed(chosen)) == coco_scores(truth, found, chosen)
    assert coco_scores(truth, found, chosen) != coco_scores(truth, found)
    of_these = [one for one in found if one["image_id"] in chosen]
    assert coco_scores(truth, of_these, chosen) == coco_scores(truth, found, chosen)


def test_boxes_alone_have_no_mask_scores() -> None:
    truth, found = scene(0)
    boxes = without(found, "segmentation")
    assert_close(coco_scores(truth, boxes), official(truth, boxes, "box")[0])


def test_masks_alone_have_the_boxes_around_them() -> None:
    truth, found = scene(0)
    masks = without(found, "bbox")
    assert_close(
        coco_scores(truth, masks), official(truth, masks, "box")[0] | official(truth, masks, "mask")[0]
    )
    assert coco_scores(truth, masks)["box_ap"] != coco_scores(truth, found)["box_ap"]


@pytest.mark.parametrize("nothing", [{}, {"segmentation": []}])
def test_an_annotation_without_a_mask_leaves_boxes_only(nothing: dict[str, Any]) -> None:
    truth, found = scene(0)
    expected = {name: score for name, score in coco_scores(truth, found).items() if name in BOX}
    del truth["annotations"][3]["segmentation"]
    truth["annotations"][3] |= nothing
    assert coco_scores(truth, found) == expected


# By hand


def one_object(side: int = 50, **more: Any) -> dict[str, Any]:
    box = [10, 10, side, side]
    segmentation = ellipse(np.array(box))
    annotation = {"id": 1, "image_id": 1, "category_id": 3, "bbox": box, "area": side**2, "iscrowd": 0}
    return {
        "images": [{"id": number, "height": SIZE[0], "width": SIZE[1]} for number in (1, 2)],
        "categories": [{"id": 3, "name": "cat"}, {"id": 4, "name": "bird"}],
        "annotations": [{**annotation, "segmentation": segmentation, **more}],
    }


def exact(truth: dict[str, Any]) -> list[dict[str, Any]]:
    keys = ("image_id", "category_id", "bbox", "segmentation")
    return [{**{key: one[key] for key in keys}, "score": 0.5} for one in truth["annotations"]]


@pytest.mark.parametrize(("side", "size"), [(20, "small"), (50, "medium"), (120, "large")])
def test_perfect_detections_have_100_for_what_is_there(side: int, size: str) -> None:
    truth = one_object(side)
    names = ["ap", "ap50", "ap75", f"ap_{size}"]
    evaluation = coco_evaluation(truth, exact(truth))
    assert evaluation.scores == {f"{kind}_{name}": 100.0 for kind in ("box", "mask") for name in names}
    assert evaluation.by_category == {"cat": {"box_ap": 100.0, "mask_ap": 100.0}}


def test_an_object_of_id_0_is_found() -> None:
    truth = one_object(id=0)
    assert coco_scores(truth, exact(truth))["box_ap"] == 100


def test_no_detections_have_0_for_what_is_there() -> None:
    names = ["ap", "ap50", "ap75", "ap_medium"]
    evaluation = coco_evaluation(one_object(), [])
    assert evaluation.scores == {f"{kind}_{name}": 0.0 for kind in ("box", "mask") for name in names}
    assert evaluation.by_category == {"cat": {"box_ap": 0.0, "mask_ap": 0.0}}
    no_mask = one_object(segmentation=[])
    assert coco_scores(no_mask, []) == {f"box_{name}": 0.0 for name in names}


def test_detections_in_other_images_only_have_0() -> None:
    truth = one_object()
    elsewhere = [{**exact(truth)[0], "image_id": 2}]
    assert set(coco_scores(truth, elsewhere, [1]).values()) == {0.0}


@pytest.mark.parametrize("images", [[2], []])
@pytest.mark.parametrize("detected", [True, False])
def test_where_nothing_is_there_are_no_scores(images: list[int], detected: bool) -> None:
    truth = one_object()
    evaluation = coco_evaluation(truth, exact(truth) if detected else [], images)
    assert (evaluation.scores, evaluation.by_category) == ({}, {})


def test_the_order_of_detections_does_not_matter() -> None:
    truth, found = scene(2)
    first = coco_scores(truth, found)
    assert coco_scores(truth, found[::-1]) == first
    assert coco_scores(truth, sorted(found, key=lambda one: one["score"])) == first


def test_what_cannot_be_scored_is_named() -> None:
    truth = one_object()
    (found,) = exact(truth)
    with pytest.raises(SettingsError, match="image_id 9 is not an image of the ground truth"):
        coco_scores(truth, [found], [1, 9])
    with pytest.raises(SettingsError, match="image_id 77 is not an image"):
        coco_scores(truth, [found, {**found, "image_id": 77}])
    with pytest.raises(SettingsError, match="1 of 2 detections have a segmentation: give all of them one"):
        coco_scores(truth, [found, *without([found], "segmentation")])
    del truth["annotations"][0]["area"]
    with pytest.raises(SettingsError, match="annotation 1 of the ground truth has no area"):
        coco_scores(truth, [found])


# From a detector


def test_detections_of_a_model_are_scored() -> None:
    truth = one_object()
    mask = torch.from_numpy(coco_mask.decode(truth["annotations"][0]["segmentation"])).bool()
    boxes = torch.tensor([[10.0, 10, 60, 60]])
    found = Detections(boxes, torch.tensor([0.3]), torch.tensor([1]), mask[None]).coco_results(1, {1: 3})
    assert set(coco_scores(truth, found).values()) == {100.0}


# Outcomes: the scores of any choice of images


def chosen(truth: dict[str, Any], found: list[dict[str, Any]], times: list[int]) -> Any:
    """A data set with as many copies of every image as `times` says, and the detections in them."""
    copies = {
        image["id"]: [1000 * (copy_number + 1) + image["id"] for copy_number in range(count)]
        for image, count in zip(sorted(truth["images"], key=lambda i: i["id"]), times, strict=True)
    }
    content = {**truth, "images": [], "annotations": []}
    for image in truth["images"]:
        content["images"] += [{**image, "id": number} for number in copies[image["id"]]]
    for annotation in truth["annotations"]:
        content["annotations"] += [
            {**annotation, "image_id": number, "id": len(content["annotations"]) + place + 1}
            for place, number in enumerate(copies[annotation["image_id"]])
        ]
    return content, [{**one, "image_id": number} for one in found for number in copies[one["image_id"]]]


@pytest.mark.parametrize("ties", [False, True])
def test_outcomes_score_as_the_detections_do(ties: bool) -> None:
    generator = np.random.default_rng(5)
    truth = random_ground_truth(generator, 12)
    found = random_detections(generator, truth, ties=ties)
    outcomes = coco_outcomes(truth, found)
    scores, expected = score_coco(outcomes, np.ones((1, len(outcomes)))), coco_scores(truth, found)
    assert list(scores) == [f"{kind}_{name}" for kind in ("box", "mask") for name in NAMES[:3]]
    for name, value in scores.items():
        assert value.tolist() == pytest.approx([expected[name]], abs=1e-9), name


def test_outcomes_score_copies_of_images_as_those_are_scored() -> None:
    generator = np.random.default_rng(6)
    truth = random_ground_truth(generator, 12)
    found = random_detections(generator, truth, ties=False)
    outcomes = coco_outcomes(truth, found)
    weights = np.array([[2, 0, 1, 1, 0, 3, 1, 1, 0, 1, 1, 1], [1] * 12, [0, 1] * 6])
    scores = score_coco(outcomes, weights.astype(float))
    for row, times in enumerate(weights.tolist()):
        expected = coco_scores(*chosen(truth, found, times))
        for name, values in scores.items():
            # Copies of a detection share a score, and COCO takes precision in between them too.
            assert values[row] == pytest.approx(expected[name], abs=0.3), (name, times)


def test_outcomes_without_masks_are_of_boxes_alone() -> None:
    generator = np.random.default_rng(7)
    truth = random_ground_truth(generator, 6)
    found = [
        {key: value for key, value in one.items() if key != "segmentation"}
        for one in random_detections(generator, truth, ties=False)
    ]
    outcomes = coco_outcomes(truth, found)
    assert list(score_coco(outcomes, np.ones((1, 6)))) == BOX[:3]


def test_nothing_found_scores_zero() -> None:
    truth = random_ground_truth(np.random.default_rng(8), 6)
    scores = score_coco(coco_outcomes(truth, []), np.ones((2, 6)))
    assert all(value == 0 for values in scores.values() for value in values)
