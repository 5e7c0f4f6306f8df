"""A RetinaNet for faces, with a block in its ResNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import box_iou

from polynl.config import Probability, Side, configured
from polynl.models.pyramid import DetectorConfig

# Height ÷ width of a face, and how the three anchors of a level are spaced.
FACE_RATIO = 1.3
FACE_SCALES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
NEGATIVE, IGNORED = -1, -2
# Overlaps in memory at a time: 2,000 faces and 100,000 anchors have 200 million.
MOST_OVERLAPS = 1 << 24


class FaceDetectorConfig(DetectorConfig):
    """The detector: three anchors at every position of every level, focal loss and DIoU loss."""

    detector = RetinaNet
    own = {  # noqa: RUF012
        "backbone": "arch",
        "num_classes": None,
        "anchor_generator": "anchor_scale",
        "head": "fpn_channels",
        "proposal_matcher": "positive_iou",
        "fg_iou_thresh": "positive_iou",
        "bg_iou_thresh": "negative_iou",
        "size_divisible": "levels",
        "_skip_resize": None,
    }

    norm: Literal["frozen", "batch", "sync"] = "batch"
    levels: tuple[Annotated[int, Field(le=12)], ...] = (2, 3, 4, 5, 6)
    """Levels of the pyramid: level n has a map of stride 2^n; tiny faces need level 2."""
    anchor_scale: float = Field(4.0, gt=0)
    """Side of the smallest of a level's three anchors, in strides."""
    positive_iou: Probability = 0.35
    """An anchor that overlaps a face at least this much is matched to it."""
    negative_iou: Probability = 0.35
    """An anchor that overlaps every face less than this is a negative."""
    min_size: Side | Annotated[list[Side], Field(min_length=1)] = 1100
    """Images to score on are resized to this shorter side; training patches are not resized."""
    max_size: Side = 1650

    def build(self) -> FaceDetector:
        """The detector; faces have the label 0."""
        positive, negative = self.positive_iou, self.negative_iou
        if negative > positive:
            raise ValueError(f"negative_iou={negative}: expected at most positive_iou={positive}")
        backbone = self.backbone(self.levels)
        sizes = tuple(
            tuple(self.anchor_scale * 2**level * scale for scale in FACE_SCALES) for level in self.levels
        )
        model = FaceDetector(
            backbone,
            num_classes=1,
            anchor_generator=ExactAnchors(sizes, ((FACE_RATIO,),) * len(sizes)),
            head=RetinaNetHead(self.fpn_channels, len(FACE_SCALES), 1),
            fg_iou_thresh=positive,
            bg_iou_thresh=negative,
            # Otherwise the coarsest map would have another stride than in training.
            size_divisible=2 ** max(self.levels),
            _skip_resize=True,
            min_size=self.min_size,
            max_size=self.max_size,
            **self.detector_options,
        )
        model.head.regression_head._loss_type = "diou"
        return self.complete(model)


def face_detector(arch: str = "resnet50", **keys: Any) -> FaceDetector:
    """A face detector with a block in its ResNet; `keys` are those of `FaceDetectorConfig`.

    >>> model = face_detector("resnet18", block="poly_nl", levels=(2, 3, 4, 5))
    >>> model.backbone.body.layer3[1].polynl_before.channels
    256
    """
    return configured(FaceDetectorConfig, arch=arch, **keys).build()


class ExactAnchors(AnchorGenerator):  # type: ignore[misc]  # torchvision has no types
    """Anchors in float32 and of exact sizes; torchvision rounds them to whole pixels, in the maps' dtype."""

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """Corners around the origin, for each ratio of height to width and each size."""
        sides = torch.as_tensor(scales, dtype=torch.float32, device=device)
        root = torch.as_tensor(aspect_ratios, dtype=torch.float32, device=device).sqrt()[:, None]
        width, height = (sides / root).flatten() / 2, (sides * root).flatten() / 2
        return torch.stack([-width, -height, width, height], 1)

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move them to the device of the maps."""
        self.cell_anchors = [cell.to(device) for cell in self.cell_anchors]  # type: ignore[has-type]


class FaceDetector(RetinaNet):  # type: ignore[misc]  # torchvision has no types
    """RetinaNet with boxes in float32, and with anchors matched some at a time."""

    def compute_loss(
        self, targets: list[dict[str, Tensor]], head_outputs: dict[str, Tensor], anchors: list[Tensor]
    ) -> dict[str, Tensor]:
        """The focal loss and the loss of boxes."""
        thresholds = self.proposal_matcher.high_threshold, self.proposal_matcher.low_threshold
        with torch.autocast(anchors[0].device.type, enabled=False):
            owners = [
                matched(target["boxes"], places, positive=thresholds[0], negative=thresholds[1])
                for target, places in zip(targets, anchors, strict=True)
            ]
            heads = {name: value.float() for name, value in head_outputs.items()}
            return self.head.compute_loss(targets, heads, anchors, owners)

    def postprocess_detections(
        self,
        head_outputs: dict[str, list[Tensor]],
        anchors: list[list[Tensor]],
        image_shapes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """The final boxes, in float32: 16 bits would move those of large images by pixels."""
        heads = {name: [value.float() for value in values] for name, values in head_outputs.items()}
        with torch.autocast(anchors[0][0].device.type, enabled=False):
            return super().postprocess_detections(heads, anchors, image_shapes)


def matched(boxes: Tensor, anchors: Tensor, *, positive: float, negative: float) -> Tensor:
    """For each anchor (x1, y1, x2, y2) the box it is matched to, `NEGATIVE` or `IGNORED`.

    An anchor is matched to the box that it overlaps most, if their IoU is at least `positive` or if no other
    anchor overlaps some box more; below `negative` it is negative. This is torchvision's Matcher with
    low-quality matches, except that a box that no anchor touches does not match all of them. Overlaps are
    computed twice, for some anchors at a time, to save memory.
    """
    if len(boxes) == 0:
        return anchors.new_full((len(anchors),), NEGATIVE, dtype=torch.int64)
    best, owners, highest = [], [], anchors.new_zeros(len(boxes))
    parts = anchors.split(max(1, MOST_OVERLAPS // len(boxes)))
    for part in parts:
        overlaps = box_iou(boxes, part)
        values, places = overlaps.max(0)
        best.append(values)
        owners.append(places)
        highest = torch.maximum(highest, overlaps.amax(1))
    # Otherwise every anchor would be the best one of a box that no anchor touches.
    highest = highest.where(highest > 0, torch.inf)
    unsurpassed = torch.cat([(box_iou(boxes, part) == highest[:, None]).any(0) for part in parts])
    iou, owner = torch.cat(best), torch.cat(owners)
    found = owner.where(iou >= positive, IGNORED).where(iou >= negative, NEGATIVE)
    return owner.where(unsurpassed, found)
