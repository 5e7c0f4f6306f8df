"""Scenes with faces, drawn from a seed, to try out face detection without a data set.

A face is an ellipse, about 1.3 times as tall as wide, with hair, eyes, a nose and a mouth, of any skin tone,
lit from one side and turned a little. Between faces there are plain ellipses and boxes, some in skin colours,
and behind everything is clutter. There are four kinds of scenes, like WIDER FACE's events: few large faces,
groups, crowds of dozens, down to a height of 4 pixels, and none at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_convert

from polynl.data.config import Split
from polynl.data.scenes import seed_of
from polynl.tasks.face_detection.data import FaceSamples, event_and_name
from polynl.tasks.face_detection.metric import SUBSETS, Faces, GroundTruth

SMALLEST = 4.0
LEAST_HEIGHTS = dict(zip(SUBSETS, (25.0, 15.0, 5.0), strict=True))
"""The least height, in pixels, of a face that counts in a subset; each subset contains those before it.

Officially WIDER FACE's subsets depend on how well EdgeBox finds a face. In its files that amounts to heights
of at least 50, 30 and 10 pixels, which hold for 98 % of such faces. These are half of that.
"""
# Scenes are drawn in chunks, each from its own seed, so that a scene depends on its number and not on how
# many there are; and they are painted a few at a time, to save memory.
CHUNK, _PAINTED = 100, 10
_MOST_PIXELS = 2**20


@dataclass(frozen=True)
class Event:
    """A kind of scene."""

    name: str
    share: float
    faces: tuple[int, int]
    """Range of the number of faces; those that would hide another are left out."""
    heights: tuple[float, float]
    """Fractions of the image's side; none is below `SMALLEST`."""


EVENTS = (
    Event("0--Portrait", 0.30, (1, 3), (0.20, 0.50)),
    Event("1--Group", 0.35, (4, 14), (0.07, 0.22)),
    Event("2--Crowd", 0.30, (30, 70), (0.00, 0.08)),
    Event("3--Empty", 0.05, (0, 0), (0.00, 0.50)),
)
_ANY_HEIGHT = 0.15
"""Share of faces of any height, whatever the event."""
_ASPECTS, _LARGEST_TURN = (1.15, 1.45), 0.3
_DISTRACTORS, _CLUTTER = 10, 10
# Smaller ones would look like faces whose features are too small to see.
_SMALLEST_DISTRACTOR = 10.0
# How much of the smaller of two boxes the other one may hide.
_HIDDEN = 0.2
_FACE, _ELLIPSE, _BOX = range(3)
_SKIN = ((0.98, 0.84, 0.74), (0.92, 0.74, 0.60), (0.80, 0.60, 0.45), (0.62, 0.43, 0.30), (0.40, 0.27, 0.19))
_HAIR = ((0.10, 0.08, 0.07), (0.30, 0.19, 0.11), (0.62, 0.45, 0.22), (0.70, 0.68, 0.66), (0.45, 0.16, 0.08))
_HAIRLINE = -0.55
# Centre and radii in units of the face's half width and half height, left and right alike; opacity; colour.
_FEATURES = (
    ((0.40, -0.10), (0.24, 0.13), 0.9, (0.93, 0.92, 0.90)),
    ((0.40, -0.10), (0.13, 0.12), 1.0, (0.08, 0.06, 0.06)),
    ((0.40, -0.32), (0.27, 0.05), 0.7, (0.08, 0.06, 0.06)),
    ((0.00, 0.18), (0.09, 0.22), 0.2, (0.00, 0.00, 0.00)),
    ((0.00, 0.56), (0.38, 0.09), 0.9, (0.55, 0.16, 0.16)),
)


@dataclass(frozen=True)
class Items:
    """k things to paint, in pixels."""

    scenes: Tensor
    """(k,), the number of the scene that each is in."""
    kinds: Tensor
    centres: Tensor
    radii: Tensor
    """(k, 2), half width and half height before turning."""
    angles: Tensor
    colours: Tensor
    hair: Tensor
    light: Tensor
    """(k,), how much brighter the right edge is than the middle."""

    @property
    def boxes(self) -> Tensor:
        """(k, 4): left, top, right and bottom edge, tight around the turned ellipse."""
        cos, sin = torch.cos(self.angles), torch.sin(self.angles)
        a, b = self.radii.unbind(1)
        reach = torch.stack([torch.hypot(a * cos, b * sin), torch.hypot(a * sin, b * cos)], 1)
        return torch.cat([self.centres - reach, self.centres + reach], 1)

    def of_scenes(self, first: int, end: int) -> Items:
        """The items of some scenes, numbered from 0."""
        some = self[(self.scenes >= first) & (self.scenes < end)]
        return replace(some, scenes=some.scenes - first)

    def __getitem__(self, chosen: Tensor) -> Items:
        return Items(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


class FaceScenes(FaceSamples):
    """`count` scenes of one split, with samples like those of `FaceImages`; all are drawn at construction.

    >>> scenes = FaceScenes(4, size=96, split="val", seed=0, training=True)
    >>> image, target = scenes[0]
    >>> tuple(image.shape), target["name"], tuple(target["boxes"].shape)
    ((3, 96, 96), '2--Crowd/000000.png', (36, 4))
    """

    def __init__(self, count: int, *, size: int, split: Split, seed: int, **options: Any) -> None:
        if count < 1 or size < 32:
            raise ValueError(f"count {count}, size {size}: expected at least 1 scene, and 32 pixels.")
        images, names, boxes = zip(*draw_face_scenes(count, size=size, split=split, seed=seed), strict=True)
        super().__init__(list(chain(*names)), list(chain(*boxes)), **options)
        self.images = torch.cat(images)

    def image(self, number: int) -> Tensor:
        """A scene."""
        return self.images[number]

    def ground_truth(self) -> GroundTruth:
        """All faces, and those that count in each subset."""
        truth = GroundTruth()
        for number, name in enumerate(self.names):
            boxes = self.boxes(number)
            least = LEAST_HEIGHTS.items()
            counted = {subset: torch.where(boxes[:, 3] >= height)[0].numpy() for subset, height in least}
            truth[event_and_name(name)] = Faces(boxes.numpy(), counted)
        return truth


def draw_face_scenes(
    count: int, *, size: int, split: Split, seed: int
) -> Iterator[tuple[Tensor, list[str], list[Tensor]]]:
    """The scenes of a split, (n, 3, size, size) as uint8, their names and faces (k, 4), a few at a time."""
    for first in range(0, count, CHUNK):
        generator = torch.Generator().manual_seed(seed_of(seed, split, first // CHUNK))
        draw = _Draw(size, generator)
        events, clutter, items = draw.scenes(CHUNK)
        for start in range(0, min(CHUNK, count - first), _PAINTED):
            # All are painted, so that the next ones do not depend on how many are wanted.
            pictures = draw.background(_PAINTED)
            _paint(pictures, clutter.of_scenes(start, start + _PAINTED))
            seen = items.of_scenes(start, start + _PAINTED)
            _paint(pictures, seen)
            pictures = (pictures + draw.noise(_PAINTED)).clamp_(0, 1).mul_(255).round_().byte()
            faces = seen[seen.kinds == _FACE]
            numbers = range(first + start, min(first + start + _PAINTED, count))
            names = [f"{EVENTS[events[number - first]].name}/{number:06}.png" for number in numbers]
            boxes = box_convert(faces.boxes, "xyxy", "xywh")
            yield pictures[: len(names)], names, [boxes[faces.scenes == n] for n in range(len(names))]


# What is in a scene


@dataclass(frozen=True)
class _Draw:
    """Draws scenes of a size at random."""

    size: int
    generator: torch.Generator

    def scenes(self, count: int) -> tuple[list[int], Items, Items]:
        """Places in `EVENTS`, the clutter behind, and faces and distractors that hardly overlap."""
        shares = torch.tensor([event.share for event in EVENTS])
        events = torch.multinomial(shares, count, replacement=True, generator=self.generator)
        fewest, most = torch.tensor([event.faces for event in EVENTS])[events].unbind(1)
        numbers = fewest + (self._uniform(count) * (most - fewest + 1)).long()
        scenes = torch.arange(count)
        faces = self._faces(scenes.repeat_interleave(numbers), events)
        others = self._others(scenes.repeat_interleave(_DISTRACTORS), heights=(0.06, 0.3), aspects=(0.7, 1.6))
        clutter = self._others(scenes.repeat_interleave(_CLUTTER), heights=(0.1, 0.5), aspects=(0.6, 2.0))
        items = Items(
            **{
                field.name: torch.cat([getattr(faces, field.name), getattr(others, field.name)])
                for field in fields(Items)
            }
        )
        kept = torch.cat([_apart(items, scene) for scene in range(count)])
        return events.tolist(), clutter, items[kept]

    def background(self, count: int) -> Tensor:
        """Soft patches of colour, coarse and fine."""
        base = self._uniform(count, 3, 1, 1, low=0.2, high=0.8)
        coarse = self._uniform(count, 3, 4, 4, low=-0.25, high=0.25)
        fine = self._uniform(count, 3, 16, 16, low=-0.12, high=0.12)
        patches = base + F.interpolate(coarse, size=(16, 16), mode="bilinear") + fine
        return F.interpolate(patches, size=(self.size, self.size), mode="bilinear")

    def noise(self, count: int) -> Tensor:
        """Noise whose strength differs from scene to scene."""
        strength = self._uniform(count, 1, 1, 1, low=0.01, high=0.06)
        return torch.randn(count, 3, self.size, self.size, generator=self.generator).mul_(strength)

    def _faces(self, scenes: Tensor, events: Tensor) -> Items:
        count = len(scenes)
        lowest = torch.tensor([max(SMALLEST, event.heights[0] * self.size) for event in EVENTS])
        highest = torch.tensor([event.heights[1] * self.size for event in EVENTS]).maximum(1.5 * lowest)
        anyhow = self._uniform(count) < _ANY_HEIGHT
        low = torch.where(anyhow, lowest.min(), lowest[events[scenes]])
        high = torch.where(anyhow, highest.max(), highest[events[scenes]])
        heights = low * (high / low) ** self._uniform(count)
        kinds = torch.full((count,), _FACE)
        angles = self._uniform(count, low=-_LARGEST_TURN, high=_LARGEST_TURN)
        colours = self._skin(count)
        return self._items(heights, _ASPECTS, scenes=scenes, kinds=kinds, angles=angles, colours=colours)

    def _others(self, scenes: Tensor, *, heights: tuple[float, float], aspects: tuple[float, float]) -> Items:
        count = len(scenes)
        low, high = (max(_SMALLEST_DISTRACTOR, height * self.size) for height in heights)
        sizes = low * (high / low) ** self._uniform(count)
        kinds = torch.where(self._uniform(count) < 0.6, _ELLIPSE, _BOX)
        angles = self._uniform(count, low=-1.5, high=1.5)
        colours = torch.where(self._uniform(count, 1) < 0.4, self._skin(count), self._uniform(count, 3))
        return self._items(sizes, aspects, scenes=scenes, kinds=kinds, angles=angles, colours=colours)

    def _items(self, heights: Tensor, aspects: tuple[float, float], **looks: Tensor) -> Items:
        """Items placed inside the image, if they fit."""
        count = len(heights)
        widths = heights / self._uniform(count, low=aspects[0], high=aspects[1])
        radii = torch.stack([widths, heights], 1) / 2
        hair = torch.tensor(_HAIR)[torch.randint(len(_HAIR), (count,), generator=self.generator)]
        light = self._uniform(count, low=-0.25, high=0.25)
        centred = Items(centres=torch.zeros(count, 2), radii=radii, hair=hair, light=light, **looks)
        reach = centred.boxes[:, 2:].clamp(max=self.size / 2)
        centres = reach + (self.size - 2 * reach) * self._uniform(count, 2)
        return replace(centred, centres=centres)

    def _skin(self, count: int) -> Tensor:
        """Colours between two skin tones, in any light."""
        tones = torch.tensor(_SKIN)
        place = self._uniform(count) * (len(tones) - 1)
        lower = place.long().clamp(max=len(tones) - 2)
        tone = torch.lerp(tones[lower], tones[lower + 1], (place - lower)[:, None])
        return tone * self._uniform(count, 1, low=0.6, high=1.05)

    def _uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.generator)


def _apart(items: Items, scene: int) -> Tensor:
    """Places of a scene's items that hardly hide each other; faces come first, the large ones before all."""
    (places,) = torch.where(items.scenes == scene)
    rank = torch.where(items.kinds[places] == _FACE, -items.radii[places, 1], 0.0)
    places = places[rank.argsort(stable=True)]
    low, high = items[places].boxes.split(2, 1)
    common = (high[:, None].minimum(high) - low[:, None].maximum(low)).clamp(min=0).prod(2)
    areas = (high - low).prod(1)
    hiding = (common > _HIDDEN * areas[:, None].minimum(areas)).tolist()
    kept: list[int] = []
    for place, hides in enumerate(hiding):
        if not any(hides[earlier] for earlier in kept):
            kept.append(place)
    return places[kept]


# How it is painted


def _paint(pictures: Tensor, items: Items) -> None:
    """Paint into pictures (n, 3, h, w), larger items over smaller ones, each in a window around it."""
    low, high = items.boxes.split(2, 1)
    # The corners of a box are outside of the ellipse's bounds, by this factor at most.
    sides = (high - low).amax(1) * torch.where(items.kinds == _BOX, 2**0.5, 1.0) + 3
    # Few window sizes, so that many items share one, and none much larger than its item.
    powers = 2 ** sides.log2().ceil()
    windows = torch.where(sides <= 0.75 * powers, 0.75 * powers, powers).long()
    for window in windows.unique().tolist():
        (group,) = torch.where(windows == window)
        group = group[items.radii[group].amax(1).argsort(stable=True)]
        for part in group.split(max(1, _MOST_PIXELS // window**2)):
            _paint_windows(pictures, items[part], window)


def _paint_windows(pictures: Tensor, items: Items, window: int) -> None:
    corners = (items.centres - window / 2).floor().long()
    covered, colours = _looks(items, corners, window)
    height, width = pictures.shape[2:]
    for number, (scene, (left, top)) in enumerate(zip(items.scenes.tolist(), corners.tolist(), strict=True)):
        down = slice(max(0, -top), min(window, height - top))
        across = slice(max(0, -left), min(window, width - left))
        place = pictures[
            scene, :, top + down.start : top + down.stop, left + across.start : left + across.stop
        ]
        place.lerp_(colours[number, :, down, across], covered[number, :, down, across])


def _looks(items: Items, corners: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """How much of every pixel of its window each item covers, (k, 1, w, w), and its colours, (k, 3, w, w)."""
    pixel = torch.arange(window) + 0.5
    right, down = (pixel + (corners - items.centres)[:, :, None]).unbind(1)
    cos, sin = (turn(items.angles)[:, None, None] for turn in (torch.cos, torch.sin))
    right, down = right[:, None, :], down[:, :, None]
    u, v = cos * right + sin * down, cos * down - sin * right
    a, b = items.radii[:, :, None, None].unbind(1)
    box = (0.5 - torch.maximum(u.abs() - a, v.abs() - b)).clamp_(0, 1)
    covered = torch.where((items.kinds == _BOX)[:, None, None], box, _ellipse(u, v, a, b))
    shading = 1 + items.light[:, None, None] * u / a
    colours = items.colours[:, :, None, None] * shading[:, None]
    faces = items.kinds == _FACE
    if faces.any():
        hair = items.hair[faces][:, :, None, None]
        colours[faces] = _with_features(colours[faces], hair, u[faces], v[faces], a[faces], b[faces])
    return covered[:, None], colours


def _with_features(colours: Tensor, hair: Tensor, u: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for (x, y), (wide, high), opacity, colour in _FEATURES:
        covered = opacity * _ellipse(u.abs() - x * a, v - y * b, wide * a, high * b)
        colours = colours.lerp(torch.tensor(colour)[:, None, None].expand_as(colours), covered[:, None])
    above = (0.5 + _HAIRLINE * b - v).clamp_(0, 1)
    return colours.lerp(hair.expand_as(colours), above[:, None])


def _ellipse(u: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """How much of a pixel at (u, v) an ellipse covers, by its distance from the edge, to first order."""
    across, down = u / a, v / b
    radius = (across**2 + down**2).sqrt_()
    slope = ((across / a) ** 2 + (down / b) ** 2).sqrt_().clamp_(min=1e-9)
    return (0.5 - radius * (radius - 1) / slope).clamp_(0, 1)
