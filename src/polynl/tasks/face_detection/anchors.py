"""Which anchor is to find which object, where there may be thousands of objects."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchvision.ops import box_iou

NEGATIVE, IGNORED = -1, -2
# Overlaps that are held at a time: 2,000 faces and 100,000 anchors have 200 million.
MOST_OVERLAPS = 1 << 24


def matched(boxes: Tensor, anchors: Tensor, *, positive: float, negative: float) -> Tensor:
    """For each anchor (x1, y1, x2, y2) the box it is to find, `NEGATIVE` or `IGNORED`.

    As torchvision's Matcher with low-quality matches has it, but for boxes that no anchor touches, to which
    that gives all of them: an anchor takes the box that it overlaps most, if their IoU is at least
    `positive`, or if no anchor overlaps some box more; it is negative below `negative`. Overlaps are computed
    twice, a part of the anchors at a time, instead of kept.
    """
    if len(boxes) == 0:
        return anchors.new_full((len(anchors),), NEGATIVE, dtype=torch.int64)
    best, owners, highest = [], [], anchors.new_zeros(len(boxes))
    for overlaps in _overlaps(boxes, anchors):
        values, places = overlaps.max(0)
        best.append(values)
        owners.append(places)
        highest = torch.maximum(highest, overlaps.amax(1))
    # A box that no anchor touches would else be the best one of all of them.
    highest = highest.where(highest > 0, torch.inf)
    unsurpassed = torch.cat([(overlaps == highest[:, None]).any(0) for overlaps in _overlaps(boxes, anchors)])
    iou, owner = torch.cat(best), torch.cat(owners)
    found = owner.where(iou >= positive, IGNORED).where(iou >= negative, NEGATIVE)
    return owner.where(unsurpassed, found)


def _overlaps(boxes: Tensor, anchors: Tensor) -> Iterator[Tensor]:
    for part in anchors.split(max(1, MOST_OVERLAPS // len(boxes))):
        yield box_iou(boxes, part)
