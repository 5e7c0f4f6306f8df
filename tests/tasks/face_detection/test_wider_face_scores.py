"""WIDER FACE's AP, against the literal protocol in plain loops and against cases worked out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from polynl.errors import SettingsError
from polynl.tasks.face_detection.files import read_ground_truth
from polynl.tasks.face_detection.metric import (
    SUBSETS,
    Array,
    Faces,
    GroundTruth,
    Predictions,
    wider_face_evaluation,
    wider_face_scores,
)
from polynl.tasks.face_detection.outcomes import score_wider_face, wider_face_outcomes

DATA = os.environ.get("POLYNL_DATA")
IMAGE = ("0--Parade", "0_Parade_band_1_1")
FACE = [10, 10, 19, 19]  # 20 × 20, since a box holds its far corner
ELSEWHERE = [500, 500, 19, 19]


# The literal protocol


def literal_overlap(box: list[float], face: list[float]) -> float:
    right, bottom, face_right, face_bottom = (
        box[0] + box[2],
        box[1] + box[3],
        face[0] + face[2],
        face[1] + face[3],
    )
    width = min(right, face_right) - max(box[0], face[0]) + 1
    height = min(bottom, face_bottom) - max(box[1], face[1]) + 1
    if width <= 0 or height <= 0:
        return 0.0
    area = (right - box[0] + 1) * (bottom - box[1] + 1)
    face_area = (face_right - face[0] + 1) * (face_bottom - face[1] + 1)
    return width * height / (area + face_area - width * height)


def literal_image(detections: Array, faces: Array, counted: set[int]) -> list[tuple[float, int, int]]:
    """Down the sorted detections: the score, and the numbers of detections and of found faces so far."""
    steps, found, number = [], set(), 0
    for *box, score in sorted(detections.tolist(), key=lambda row: -row[4]):
        overlaps = [literal_overlap(box, face) for face in faces.tolist()]
        best = overlaps.index(max(overlaps))
        if overlaps[best] < 0.5:
            number += 1
        elif best in counted:
            number += 1
            found.add(best)
        steps.append((score, number, len(found)))
    return steps


def literal_ap(truth: GroundTruth, predictions: Predictions, subset: str) -> float:
    scores = [score for detections in predictions.values() for score in detections[:, 4].tolist()]
    low, high = min(scores), max(scores)
    images = []
    for image, faces in truth.items():
        if len(faces.boxes) and len(predictions[image]):
            detections = predictions[image].copy()
            detections[:, 4] = (detections[:, 4] - low) / (high - low)
            images.append(literal_image(detections, faces.boxes, set(faces.counted[subset].tolist())))
    total = sum(len(faces.counted[subset]) for faces in truth.values())
    points = [(0.0, 0.0)]
    passed = [0] * len(images)
    for step in range(1, 1001):
        number = found = 0
        for place, steps in enumerate(images):
            while passed[place] < len(steps) and steps[passed[place]][0] >= 1 - step / 1000:
                passed[place] += 1
            if passed[place]:
                _, number_here, found_here = steps[passed[place] - 1]
                number, found = number + number_here, found + found_here
        points.append((found / total, found / number if number else 0.0))
    area = 0.0
    for place in range(1, len(points)):
        gained = points[place][0] - points[place - 1][0]
        if gained:
            area += gained * max(precision for _, precision in points[place:])
    return area


# Small sets


def one_image(faces: list[list[float]], counted: list[int], *, hard: list[int] | None = None) -> GroundTruth:
    """Easy and Medium count the same faces; Hard all of them, unless told."""
    rows = np.array(counted, dtype=int)
    every = np.arange(len(faces)) if hard is None else np.array(hard, dtype=int)
    boxes = np.array(faces, dtype=float).reshape(-1, 4)
    return GroundTruth({IMAGE: Faces(boxes, {"easy": rows, "medium": rows, "hard": every})})


def found(*rows: list[float]) -> Predictions:
    return {IMAGE: np.array(rows, dtype=float).reshape(-1, 5)}


def random_truth(generator: np.random.Generator, images: int) -> GroundTruth:
    """Crowds that overlap; faces of no size; images without faces and without counted ones."""
    truth = {}
    for number in range(images):
        n = 0 if number % 7 == 3 else int(generator.integers(1, 15))
        boxes = np.concatenate([generator.integers(0, 90, (n, 2)), generator.integers(0, 40, (n, 2))], 1)
        hard = np.flatnonzero(generator.random(n) < 0.8)
        medium = hard[generator.random(len(hard)) < 0.6]
        easy = medium[:0] if number % 5 == 0 else medium[generator.random(len(medium)) < 0.6]
        counted = {"easy": easy, "medium": medium, "hard": hard}
        truth[f"{number % 3}--Event_{number % 3}", f"image_{number}"] = Faces(boxes.astype(float), counted)
    return GroundTruth(truth)


def detector(generator: np.random.Generator, truth: GroundTruth, *, ties: bool = False) -> Predictions:
    """Faces found nearly where they are, missed, and found twice; and things that are no faces."""
    predictions = {}
    for image, faces in truth.items():
        times = generator.choice([0, 1, 1, 1, 2, 3], len(faces.boxes))
        boxes = np.repeat(faces.boxes, times, axis=0)
        boxes = boxes + generator.normal(0, 0.1, boxes.shape) * np.tile(np.maximum(boxes[:, 2:], 1), 2)
        others = generator.uniform(0, 90, (generator.integers(0, 12), 4))
        boxes = np.concatenate([np.maximum(boxes, [-9, -9, 0, 0]), others])
        scores = generator.random(len(boxes)) * 0.9 + 0.05
        scores[len(boxes) - len(others) :] *= 0.7
        rows = np.column_stack([boxes, scores.round(1) if ties else scores])
        predictions[image] = generator.permutation(rows)
    return predictions


def scene(seed: int, *, ties: bool = False) -> tuple[GroundTruth, Predictions]:
    generator = np.random.default_rng(seed)
    truth = random_truth(generator, 15)
    return truth, detector(generator, truth, ties=ties)


# Against the literal protocol


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_small_sets_score_as_the_literal_protocol(seed: int, ties: bool) -> None:
    truth, predictions = scene(seed, ties=ties)
    ap = wider_face_evaluation(truth, predictions).ap
    assert list(ap) == list(SUBSETS)
    for subset, value in ap.items():
        assert 0.05 < value < 0.95
        assert value == pytest.approx(literal_ap(truth, predictions, subset), abs=1e-12)


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with WIDER FACE's ground truth")
def test_official_faces_score_as_the_literal_protocol() -> None:
    whole = read_ground_truth(Path(str(DATA)) / "widerface-ground-truth")
    truth = whole.only(
        image for image in whole if image[0] in ("39--Ice_Skating", "59--people--driving--car")
    )
    assert len(truth) > 60
    predictions = detector(np.random.default_rng(0), truth)
    ap = wider_face_evaluation(truth, predictions).ap
    for subset in SUBSETS:
        assert 0.05 < ap[subset] < 0.95
        assert ap[subset] == pytest.approx(literal_ap(truth, predictions, subset), abs=1e-12)


# By hand


def test_a_mistake_above_a_face_halves_the_precision() -> None:
    truth = one_image([FACE, [100, 10, 19, 19]], [0, 1])
    predictions = found([*ELSEWHERE, 0.9], [*FACE, 0.5], [100, 10, 19, 19, 0.1])
    evaluation = wider_face_evaluation(truth, predictions)
    # Normalised scores 1, 0.5 and 0: recall ½ at precision ½, then 1 at ⅔, which is better for both halves.
    assert evaluation.ap["easy"] == pytest.approx(2 / 3)
    recall, precision = evaluation.curves["easy"]
    assert len(recall) == len(precision) == 1000
    # The thresholds are 0.999 at place 0, 0.5 at 499, and 0 at 999.
    assert recall[[0, 498, 499, 998, 999]].tolist() == [0, 0, 0.5, 0.5, 1]
    assert precision[[0, 498, 499, 998, 999]].tolist() == pytest.approx([0, 0, 0.5, 0.5, 2 / 3])


def test_precision_is_the_best_at_a_recall_or_beyond() -> None:
    truth = one_image([FACE, [100, 10, 19, 19], [200, 10, 19, 19]], [0, 1, 2])
    rows = [[*FACE, 1.0], [*ELSEWHERE, 0.9], [100, 10, 19, 19, 0.5], [*ELSEWHERE, 0.2], [*ELSEWHERE, 0.0]]
    # One of three faces at precision 1, the second at ⅔, the third never.
    assert wider_face_evaluation(truth, found(*rows)).ap["easy"] == pytest.approx((1 + 2 / 3) / 3)


def test_of_two_detections_of_a_face_one_is_a_mistake() -> None:
    truth = one_image([FACE, [100, 10, 19, 19]], [0, 1])
    rows = [[*FACE, 1.0], [*FACE, 0.9], [100, 10, 19, 19, 0.0]]
    assert wider_face_evaluation(truth, found(*rows)).ap["easy"] == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.parametrize(
    ("box", "belongs"),
    [
        # Of the face's 20 × 20: 20 × 10 is just enough, where the official code counts the far corner.
        ([10, 10, 19, 9], True),
        ([10, 10, 19, 8.9], False),
        # 20 × 40 around it is just enough.
        ([10, 10, 19, 39], True),
        ([10, 10, 19, 39.1], False),
        # Beside it both ways: two negative sides are no area.
        ([-100, -100, 19, 19], False),
        ([20, 20, 0, 0], False),
    ],
)
def test_half_an_overlap_is_enough_and_boxes_hold_their_far_corner(box: list[float], belongs: bool) -> None:
    assert wider_face_evaluation(one_image([FACE], [0]), found([*box, 0.5])).ap["easy"] == float(belongs)


def test_a_detection_belongs_to_the_face_it_overlaps_most() -> None:
    truth = one_image([[10, 10, 19, 19], [12, 10, 19, 19]], [1])
    # The better of two is the ignored face: the counted one, though overlapped by more than ½, is not found.
    assert wider_face_evaluation(truth, found([10, 10, 19, 19, 0.9])).ap["easy"] == 0
    assert wider_face_evaluation(truth, found([12, 10, 19, 19, 0.9])).ap["easy"] == 1
    # Of equal ones, the first.
    assert wider_face_evaluation(truth, found([11, 10, 19, 19, 0.9])).ap["easy"] == 0


def test_a_face_without_size_is_one_pixel() -> None:
    truth = one_image([[10, 10, 0, 0], [50, 50, -2, 23]], [0])
    assert wider_face_evaluation(truth, found([10, 10, 0, 0, 0.5])).ap == {
        "easy": 1,
        "medium": 1,
        "hard": 0.5,
    }


# What changes nothing


@pytest.mark.parametrize("seed", range(3))
def test_perfect_predictions_are_1(seed: int) -> None:
    truth = random_truth(np.random.default_rng(seed), 15)
    for scores in (np.random.default_rng(seed).random, np.ones):
        predictions = {}
        for image, faces in truth.items():
            boxes = np.unique(faces.boxes, axis=0)
            assert len(boxes) == len(faces.boxes), "no two faces at one place"
            predictions[image] = np.column_stack([boxes, scores(len(boxes))])
        assert wider_face_evaluation(truth, predictions).ap == {"easy": 1.0, "medium": 1.0, "hard": 1.0}
        assert wider_face_scores(truth, predictions) == {"easy_ap": 100, "medium_ap": 100, "hard_ap": 100}


@pytest.mark.parametrize("ties", [False, True])
def test_order_changes_nothing(ties: bool) -> None:
    truth, predictions = scene(5, ties=ties)
    generator = np.random.default_rng(6)
    shuffled = {image: generator.permutation(predictions[image]) for image in reversed(list(predictions))}
    backwards = GroundTruth(dict(reversed(truth.items())))
    expected = wider_face_evaluation(truth, predictions).ap
    assert wider_face_evaluation(truth, shuffled).ap == expected
    assert wider_face_evaluation(backwards, shuffled).ap == expected


@pytest.mark.parametrize(
    ("scale", "shift"), [(16.0, 0.0), (1000.0, -500.0), (0.01, 0.2), (3.0, 7.0), (1.0, -9.0)]
)
def test_scaled_and_shifted_scores_change_nothing(scale: float, shift: float) -> None:
    truth, predictions = scene(7)
    moved = {image: rows * [1, 1, 1, 1, scale] + [0, 0, 0, 0, shift] for image, rows in predictions.items()}
    expected = wider_face_evaluation(truth, predictions).ap
    assert wider_face_evaluation(truth, moved).ap == pytest.approx(expected, abs=1e-12)


def test_detections_of_an_ignored_face_change_nothing() -> None:
    truth = one_image([FACE, [100, 10, 19, 19]], [0])
    rows = [[*FACE, 1.0], [*ELSEWHERE, 1.0], [*ELSEWHERE, 0.0]]
    ignored = [[100, 10, 19, 19, score] for score in (1.0, 0.7, 0.7, 0.0)]
    expected = wider_face_evaluation(truth, found(*rows))
    evaluation = wider_face_evaluation(truth, found(*ignored, *rows))
    assert evaluation.ap["easy"] == expected.ap["easy"] == 0.5
    assert np.array_equal(evaluation.curves["easy"], expected.curves["easy"])
    assert evaluation.ap["hard"] > expected.ap["hard"], "it counts there"


def test_a_curve_begins_at_the_first_threshold_with_a_detection() -> None:
    truth = one_image([FACE, [100, 10, 19, 19]], [0])
    evaluation = wider_face_evaluation(truth, found([100, 10, 19, 19, 1.0], [*FACE, 0.5], [*ELSEWHERE, 0.0]))
    recall, precision = evaluation.curves["easy"]
    assert len(recall) == 501
    assert (recall[0], precision[0], precision[-1]) == (1, 1, 0.5)
    assert evaluation.ap["easy"] == 1


# What is rare


def test_nothing_found_is_0() -> None:
    evaluation = wider_face_evaluation(one_image([FACE], [0]), found())
    assert evaluation.ap == {"easy": 0, "medium": 0, "hard": 0}
    assert [len(recall) for recall, _ in evaluation.curves.values()] == [0, 0, 0]


def test_equal_scores_are_one_point() -> None:
    evaluation = wider_face_evaluation(one_image([FACE], [0]), found([*FACE, 0.7], [*ELSEWHERE, 0.7]))
    assert evaluation.ap["easy"] == 0.5
    assert {tuple(point) for point in np.transpose(evaluation.curves["easy"]).tolist()} == {(1.0, 0.5)}


def test_an_image_without_counted_faces_has_mistakes_and_one_without_faces_has_none() -> None:
    face = Faces(np.array([FACE], dtype=float), dict.fromkeys(SUBSETS, np.array([0])))
    uncounted = Faces(face.boxes, dict.fromkeys(SUBSETS, np.array([], dtype=int)))
    empty = Faces(np.zeros((0, 4)), uncounted.counted)
    right, wrong = np.array([[*FACE, 0.5]]), np.array([[*ELSEWHERE, 0.9], [*ELSEWHERE, 0.1]])
    for other, expected in ((uncounted, 0.5), (empty, 1.0)):
        truth = GroundTruth({("a", "1"): other, ("a", "2"): face})
        ap = wider_face_evaluation(truth, {("a", "1"): wrong, ("a", "2"): right}).ap
        assert ap == dict.fromkeys(SUBSETS, expected)


def test_the_scores_of_images_without_faces_belong_to_the_range() -> None:
    """As in both programs: with them there, no threshold is between the face's score and the mistake's."""
    face = Faces(np.array([FACE], dtype=float), dict.fromkeys(SUBSETS, np.array([0])))
    empty = Faces(np.zeros((0, 4)), dict.fromkeys(SUBSETS, np.array([], dtype=int)))
    truth = GroundTruth({("a", "1"): face, ("a", "2"): empty})
    near = np.array([[*FACE, 0.52], [*ELSEWHERE, 0.51]])
    far = np.array([[*ELSEWHERE, 100], [*ELSEWHERE, 0]])
    for others, expected in ((far[:0], 1.0), (far, 0.5)):
        assert wider_face_evaluation(truth, {("a", "1"): near, ("a", "2"): others}).ap["easy"] == expected


def test_crowds_and_eager_detectors_are_scored() -> None:
    """More faces than the largest image has, and so many detections that they are compared in parts."""
    x, y = np.meshgrid(np.arange(50) * 30, np.arange(40) * 30)
    boxes = np.column_stack([x.ravel(), y.ravel(), np.full((2000, 2), 20)]).astype(float)
    truth = one_image(boxes.tolist(), list(range(0, 2000, 2)))
    rows = np.column_stack([np.tile(boxes, (2, 1)), np.linspace(1, 0, 4000)])
    ap = wider_face_evaluation(truth, {IMAGE: rows}).ap
    assert ap == pytest.approx({"easy": 1, "medium": 1, "hard": 1})
    assert wider_face_evaluation(truth, {IMAGE: rows[1:2000:2]}).ap == {"easy": 0, "medium": 0, "hard": 0.5}


# Parts of the set, and what is refused


def test_a_part_is_scored_by_itself() -> None:
    truth, predictions = scene(8)
    chosen = [image for image in truth if image[0] == "1--Event_1"]
    part = truth.only(chosen)
    assert list(part) == chosen
    assert part.events == ["1--Event_1"]
    assert part.count("hard") < truth.count("hard")
    own = {image: predictions[image] for image in part}
    expected = {subset: literal_ap(part, own, subset) for subset in SUBSETS}
    assert wider_face_evaluation(part, own).ap == pytest.approx(expected, abs=1e-12)


def test_a_subset_without_faces_is_left_out() -> None:
    assert wider_face_scores(one_image([FACE], []), found([*FACE, 0.5])) == {"hard_ap": 100}
    nothing = one_image([FACE], [], hard=[])
    assert wider_face_evaluation(nothing, found([*FACE, 0.5])).curves == {}


def test_unknown_and_missing_images_are_named() -> None:
    truth = one_image([FACE], [0])
    expected = r"band_1_1\.jpg.*not in the ground truth.*mean 0--Parade/0_Parade_band_1_1\?"
    with pytest.raises(SettingsError, match=expected):
        wider_face_scores(truth, {**found(), (IMAGE[0], IMAGE[1] + ".jpg"): np.zeros((0, 5))})
    with pytest.raises(
        SettingsError, match=r"0--Parade/0_Parade_band_1_1 has no predictions \(1 of 1 images have none\)"
    ):
        wider_face_scores(truth, {})
    with pytest.raises(
        SettingsError, match=r"an image to score is \('0--Parade', 'other'\), which is not in"
    ):
        truth.only([IMAGE, ("0--Parade", "other")])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2, 3, 4]], r"have the shape \(1, 4\): expected \(k, 5\)"),
        ([1, 2, 3, 4, 0.5], r"have the shape \(5,\): expected \(k, 5\)"),
        ([[1, 2, 3, 4, 0.5], [1, 2, 3, 4, np.nan]], r"row 1 is \[1.0, 2.0, 3.0, 4.0, nan\]: expected finite"),
        ([[np.inf, 2, 3, 4, 0.5]], r"row 0 is \[inf, .*expected finite"),
        ([[1, 2, -3, 4, 0.5]], r"row 0 is .* w and h not negative"),
        ([[1, 2, 3, -0.5, 0.5]], r"row 0 is .* w and h not negative"),
    ],
)
def test_wrong_predictions_in_memory_are_named(rows: list[list[float]], message: str) -> None:
    with pytest.raises(SettingsError, match=rf"predictions of 0--Parade/0_Parade_band_1_1,? {message}"):
        wider_face_scores(one_image([FACE], [0]), {IMAGE: np.array(rows)})


# Outcomes: the scores of any choice of images


@pytest.mark.parametrize("seed", range(4))
def test_outcomes_score_as_the_predictions_do(seed: int) -> None:
    generator = np.random.default_rng(seed)
    truth = random_truth(generator, 30)
    found = detector(generator, truth)
    scores = score_wider_face(wider_face_outcomes(truth, found), np.ones((1, 30)))
    assert {name: value.item() for name, value in scores.items()} == pytest.approx(
        wider_face_scores(truth, found), abs=1e-9
    )


def test_outcomes_score_copies_of_images_as_those_are_scored() -> None:
    generator = np.random.default_rng(9)
    truth = random_truth(generator, 20)
    found = detector(generator, truth)
    weights = generator.integers(0, 3, (4, 20))
    outcomes = wider_face_outcomes(truth, found)
    scores = score_wider_face(outcomes, weights.astype(float))
    # Scores are normalised over all images, so the one with the lowest and the one with the highest stay.
    for row, times in enumerate(weights.tolist()):
        copies = {tuple(name.split("/")): count for name, count in zip(outcomes.images, times, strict=True)}
        extremes = [
            max(found, key=lambda image: found[image][:, 4].max(initial=-9)),
            min(found, key=lambda image: found[image][:, 4].min(initial=9)),
        ]
        names = [(image, k) for image, count in copies.items() for k in range(count)]
        chosen_truth = GroundTruth({(image[0], f"{image[1]}-{k}"): truth[image] for image, k in names})
        chosen_found = {(image[0], f"{image[1]}-{k}"): found[image] for image, k in names}
        # An image without faces is not scored, but its scores count in the range.
        nothing = Faces(np.zeros((0, 4)), {subset: np.zeros(0, dtype=int) for subset in SUBSETS})
        for image in extremes:
            chosen_truth["range", image[1]], chosen_found["range", image[1]] = nothing, found[image]
        expected = wider_face_scores(chosen_truth, chosen_found)
        assert {name: values[row] for name, values in scores.items()} == pytest.approx(expected, abs=1e-9)
