"""Detections: selected by score, and as entries of a COCO results file."""

from __future__ import annotations

import json

import pytest
import torch
from pycocotools import mask as coco_mask

from polynl.tasks.detections import Detections

# pycocotools has not followed NumPy 2 in decoding, which only tests do.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)


def test_detections_of_a_model_are_ready_for_json() -> None:
    generator = torch.Generator().manual_seed(0)
    boxes = torch.tensor([[1.1, 2.2, 30.3, 40.4], [5, 6, 7, 9], [0, 0, 3, 2.5]])
    labels, scores = torch.tensor([2, 9, 1]), torch.tensor([0.9, 0.8, 0.1])
    masks = torch.rand(3, 21, 34, generator=generator) < 0.4
    found = Detections(boxes, scores, labels, masks).coco_results(12, {1: 1, 2: 90})
    assert json.loads(json.dumps(found)) == found
    assert [list(one) for one in found] == [["image_id", "category_id", "score", "bbox", "segmentation"]] * 2
    assert [(one["image_id"], one["category_id"]) for one in found] == [(12, 90), (12, 1)]
    assert [one["score"] for one in found] == scores[[0, 2]].tolist()
    assert [one["bbox"] for one in found] == [
        pytest.approx([1.1, 2.2, 29.2, 38.2], abs=1e-5),
        [0.0, 0.0, 3.0, 2.5],
    ]
    for one, mask in zip(found, masks[[0, 2]], strict=True):
        assert one["segmentation"]["size"] == [21, 34]
        assert torch.equal(torch.from_numpy(coco_mask.decode(one["segmentation"])).bool(), mask)


def test_detections_without_masks_or_categories_or_anything() -> None:
    found = Detections(torch.rand(2, 4), torch.rand(2), torch.tensor([1, 2]))
    assert [list(one) for one in found.coco_results(0, {1: 5, 2: 6})] == [
        ["image_id", "category_id", "score", "bbox"]
    ] * 2
    assert [one["category_id"] for one in found.coco_results(0)] == [1, 2]
    masked = Detections(found.boxes, found.scores, found.labels, torch.ones(2, 4, 5).bool())
    assert masked.coco_results(0, {3: 1}) == []
    assert masked[:0].coco_results(0, {1: 5}) == []


def test_masks_that_are_still_probabilities_are_refused() -> None:
    found = Detections(torch.rand(1, 4), torch.rand(1), torch.tensor([1]), torch.rand(1, 1, 4, 5))
    with pytest.raises(
        ValueError, match=r"masks: expected bool \(k, h, w\), got torch.float32 \(1, 1, 4, 5\)"
    ):
        found.coco_results(0)


def test_detections_above_a_threshold() -> None:
    masks = torch.rand(3, 4, 5) < 0.5
    found = Detections(torch.rand(3, 4), torch.tensor([0.2, 0.5, 0.9]), torch.tensor([1, 2, 3]), masks)
    sure = found.above(0.5).cpu()
    assert len(sure) == 2
    assert sure.labels.tolist() == [2, 3]
    assert torch.equal(sure.boxes, found.boxes[1:])
    assert sure.masks is not None
    assert torch.equal(sure.masks, masks[1:])
    assert Detections(found.boxes, found.scores, found.labels).above(0.9).masks is None


def test_widths_are_exact_in_float64() -> None:
    found = Detections(torch.tensor([[0.1, 0.2, 1000.3, 0.7]]), torch.ones(1), torch.ones(1))
    x1, y1, x2, y2 = found.boxes.double()[0]
    assert torch.equal(found.xywh()[0], torch.stack([x1, y1, x2 - x1, y2 - y1]))
