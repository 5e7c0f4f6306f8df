"""What a detector finds in an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_convert


@dataclass(frozen=True, eq=False)
class Detections:
    """k detections in an image."""

    boxes: Tensor
    """(k, 4): left, top, right and bottom edge in pixels."""
    scores: Tensor
    """(k,), from 0 to 1."""
    labels: Tensor
    """(k,), the task's numbers of categories."""
    masks: Tensor | None = None
    """(k, h, w), boolean."""

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, chosen: Tensor | slice | list[int]) -> Detections:
        masks = None if self.masks is None else self.masks[chosen]
        return Detections(self.boxes[chosen], self.scores[chosen], self.labels[chosen], masks)

    def above(self, threshold: float) -> Detections:
        """Those whose score is at least `threshold`."""
        return self[self.scores >= threshold]

    def cpu(self) -> Detections:
        """The same detections on the CPU."""
        masks = None if self.masks is None else self.masks.cpu()
        return Detections(self.boxes.cpu(), self.scores.cpu(), self.labels.cpu(), masks)

    def xywh(self) -> Tensor:
        """(k, 4): left and top edge, width and height, in float64."""
        return box_convert(self.boxes.double(), "xyxy", "xywh")

    def coco_results(
        self, image_id: int, category_ids: Mapping[int, int] | None = None
    ) -> list[dict[str, Any]]:
        """Entries of a COCO results file: image_id, category_id, score, bbox and, with masks, segmentation.

        `category_ids` maps labels to COCO's ids and leaves other labels out (default: labels are the ids).
        """
        labels: list[int] = self.labels.tolist()
        if category_ids is None:
            category_ids = {label: label for label in labels}
        found = self[[place for place, label in enumerate(labels) if label in category_ids]]
        columns = found.labels.tolist(), found.scores.tolist(), found.xywh().tolist()
        entries: list[dict[str, Any]] = [
            {"image_id": image_id, "category_id": category_ids[label], "score": score, "bbox": box}
            for label, score, box in zip(*columns, strict=True)
        ]
        if found.masks is not None:
            for entry, rle in zip(entries, encode_masks(found.masks), strict=True):
                entry["segmentation"] = rle
        return entries


def encode_masks(masks: Tensor) -> list[dict[str, Any]]:
    """COCO's RLE of boolean masks (k, h, w), with text for counts."""
    if masks.dtype != torch.bool or masks.ndim != 3:
        raise ValueError(f"masks: expected bool (k, h, w), got {masks.dtype} {tuple(masks.shape)}.")
    from pycocotools import mask as coco_mask  # not every task has it

    # pycocotools takes (h, w, k), column by column, which is (k, w, h) read backwards.
    columns = masks.mT.contiguous().to(torch.uint8).cpu().numpy().T
    return [rle_as_text(rle) for rle in coco_mask.encode(columns)]


def rle_as_text(rle: Mapping[str, Any]) -> dict[str, Any]:
    """An RLE of pycocotools as JSON has it."""
    counts = rle["counts"]
    return {
        "size": [int(side) for side in rle["size"]],
        "counts": counts if isinstance(counts, str) else counts.decode(),
    }
