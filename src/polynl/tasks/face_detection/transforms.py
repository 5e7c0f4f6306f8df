"""Training augmentation for faces: square patches of random size and place."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from polynl.config import Config, Fractions, Probability, Side


class PatchConfig(Config):
    """Square training patches."""

    size: Side = 640
    """Side in pixels after resizing."""
    scale: Fractions = (0.3, 1.0)
    """Side before resizing, as a fraction of the image's shorter side: [from, to]."""
    distort: Probability = 0.5
    """Probability of each colour distortion."""
    min_face: float = Field(0.0, ge=0)
    """Faces whose shorter side is below this number of pixels are left out."""


class FacePatch:
    """A square patch of random size and place, resized, with colour distortion and flip.

    As in RetinaFace, the patch's side is a fraction of the image's shorter side, drawn uniformly. A face is
    in the patch if the centre of its box is; the box is clipped to the patch. If the image has faces and the
    patch does not, it is drawn again, up to `attempts` times in all. Distortions are those of torchvision's
    RandomPhotometricDistort: brightness, contrast, saturation, hue, order of channels. Faces that are left
    out because they are small are learned as background.

    Everything is drawn from torch's global generator.

    >>> patch = FacePatch(PatchConfig(size=64, scale=(0.5, 0.5), distort=0.0), flip=0.0)
    >>> image, boxes = patch(torch.zeros(3, 96, 128, dtype=torch.uint8), torch.tensor([[0.0, 0, 128, 96]]))
    >>> tuple(image.shape), boxes.tolist()
    ((3, 64, 64), [[0.0, 0.0, 64.0, 64.0]])
    """

    def __init__(self, options: PatchConfig, *, flip: float = 0.5, attempts: int = 50) -> None:
        self.size, self.scale, self.min_face = options.size, options.scale, options.min_face
        self.attempts = attempts
        self._distort = v2.RandomPhotometricDistort(p=options.distort)
        self._flip = v2.RandomHorizontalFlip(flip)

    def __call__(self, image: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """Transform an image (3, h, w) and boxes (k, 4), xyxy, which become float32."""
        boxes = boxes.float()
        top, left, side, kept = self._patch(image, boxes)
        faces = tv_tensors.BoundingBoxes(boxes[kept], format="XYXY", canvas_size=tuple(image.shape[1:]))
        parts = tv_tensors.Image(image), faces
        cropped = (functional.crop(part, top, left, side, side) for part in parts)
        # Before resizing: most patches are enlarged.
        distorted = self._distort(*cropped)
        resized = (functional.resize(part, [self.size, self.size], antialias=True) for part in distorted)
        image, boxes = (part.as_subclass(Tensor) for part in self._flip(*resized))
        return image, boxes

    def _patch(self, image: Tensor, boxes: Tensor) -> tuple[int, int, int, Tensor]:
        """Top and left edge, side, and which faces are in it, (k,)."""
        height, width = image.shape[1:]
        for _ in range(self.attempts if len(boxes) else 1):
            fraction = self.scale[0] + (self.scale[1] - self.scale[0]) * torch.rand(()).item()
            side = max(1, round(fraction * min(height, width)))
            top, left = (int(torch.randint(whole - side + 1, ())) for whole in (height, width))
            kept = self._inside(boxes, top, left, side)
            if kept.any():
                break
        return top, left, side, kept

    def _inside(self, boxes: Tensor, top: int, left: int, side: int) -> Tensor:
        low = boxes.new_tensor([left, top])
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - low
        edges = (boxes - low.repeat(2)).clamp(0, side) * (self.size / side)
        shorter = (edges[:, 2:] - edges[:, :2]).amin(1)
        return ((centres >= 0) & (centres < side)).all(1) & (shorter > 0) & (shorter >= self.min_face)
