"""Draw boxes, masks and labels on an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import resize
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

# The palette of Okabe and Ito, safe for colour-blind readers, without its black.
COLOURS = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
FONT = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
# Smaller images are enlarged, so that labels can be read,
SHORTEST_SIDE = 480
# but not beyond this: thin images would become very long.
LONGEST_SIDE = 1600


def draw_detections(
    image: Tensor, boxes: Tensor, labels: Sequence[str], masks: Tensor | None = None
) -> Tensor:
    """The uint8 image (3, h, w), enlarged if it is small, with each detection in a colour of its own.

    Earlier detections are drawn on top of later ones.
    """
    larger = max(1.0, min(SHORTEST_SIDE / min(image.shape[-2:]), LONGEST_SIDE / max(image.shape[-2:])))
    height, width = (round(side * larger) for side in image.shape[-2:])
    canvas = resize(image, [height, width], antialias=True)
    if not labels:
        return canvas
    boxes = boxes * torch.tensor([width, height] * 2) / torch.tensor(image.shape[:0:-1] * 2)
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(labels))][::-1]
    if masks is not None:
        for mask, colour in zip(masks.flip(0), colours, strict=True):
            larger_mask = resize(mask[None].float(), [height, width], antialias=False) > 0.5
            canvas = draw_segmentation_masks(canvas, larger_mask, alpha=0.45, colors=colour)
    thick = max(2, round(min(height, width) / 250))
    return draw_bounding_boxes(
        canvas,
        boxes.flip(0),
        labels=list(labels)[::-1],
        colors=list(colours),
        width=thick,
        font=str(FONT),
        font_size=max(12, round(min(height, width) / 32)),
        label_colors=[_text_colour(colour) for colour in colours],
        label_background_colors=list(colours),
        fill_labels=True,
    )


def _text_colour(background: tuple[int, int, int]) -> str:
    red, green, blue = background
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "white"
