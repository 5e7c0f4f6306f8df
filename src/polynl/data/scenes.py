"""Scenes whose label is a relation between distant objects, drawn from a seed.

Coloured figures lie along two sides of the image, and a coloured square, the cue, in the corner across. The
label is the shape of the figure that has the cue's colour. What the figures are is local; which of them is
meant is not: between the cue and any figure lies at least `GAP` of the image's side, so that no window
narrower than that sees both. A network of such windows with a mean over positions behind them has logits that
are a sum, of what the figures say and of what the cue says. No such sum has a cross entropy below
log(figures): exchanging colours changes nothing in the scenes, and the mean of the sum over all exchanges,
which is no worse since the loss is convex, does not depend on the cue. It names the figures and guesses among
them. (Counted in right answers alone, some sums that cross entropy does not lead to are better than guessing:
with two figures 3 in 4 is the most, with three 2 in 3.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.ops import masks_to_boxes

from polynl.data.config import Split
from polynl.data.shapes import SHAPES, coverage

GAP = 0.5
# Figures have any shape but the last, which is the cue's.
CLASSES = tuple(SHAPES)[:-1]
CATEGORIES = (*CLASSES, "cue")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.15, 0.15),
    "green": (0.15, 0.75, 0.20),
    "blue": (0.20, 0.35, 0.95),
    "yellow": (0.95, 0.85, 0.15),
    "magenta": (0.85, 0.25, 0.85),
    "cyan": (0.15, 0.80, 0.85),
}
SPLITS: tuple[Split, ...] = ("train", "val")
# Scenes are drawn in chunks, each from its own seed, so that a scene depends on its number and not on how
# many there are; and they are painted a few at a time, to save memory.
CHUNK, _PAINTED = 250, 25


@dataclass(frozen=True)
class Difficulty:
    """What makes a scene harder; guessing among the figures is right once in `figures`."""

    figures: int
    colours: int
    """How many of `COLOURS` figures may have; with fewer, a network learns sooner to compare them."""
    distractors: int
    smallest: float
    """Radius of the smallest figure; that of the largest is `LARGEST`."""
    turn: float
    """Largest rotation of a figure, in radians."""
    tint: float
    """Largest difference from the pure colour."""
    shading: float
    """Largest change of the background's brightness from side to side."""
    noise: float


DIFFICULTIES = {
    "easy": Difficulty(2, 3, 0, smallest=0.12, turn=0.0, tint=0.00, shading=0.0, noise=0.02),
    "medium": Difficulty(2, 4, 2, smallest=0.11, turn=0.2, tint=0.05, shading=0.1, noise=0.04),
    "hard": Difficulty(3, 6, 4, smallest=0.10, turn=0.25, tint=0.10, shading=0.2, noise=0.06),
}

# Lengths are fractions of the image's side. A turned figure reaches a little beyond its radius: with the
# largest turn, the corner of a triangle 1.08 times.
LARGEST = 0.13
_REACH = 1.1
_CUE_CENTRE, _CUE_RADIUS = 0.115, 0.12
_BAND = _CUE_CENTRE + 0.8 * _CUE_RADIUS + GAP + _REACH * LARGEST
_ALONG = (_REACH * LARGEST, 0.5, _BAND)
# Where things lie when the cue is at the top left; other scenes are mirrored.
_FIGURE_CELLS = torch.tensor([(_BAND, y) for y in _ALONG] + [(x, _BAND) for x in _ALONG[:-1]])
_DISTRACTOR_CELLS = torch.tensor([(x, y) for x in (0.11, 0.335, 0.585) for y in (0.11, 0.335, 0.585)][1:])
_DISTRACTOR_RADII = (0.07, 0.095)


@dataclass(frozen=True)
class Instances:
    """The k items of a scene that cover at least one pixel, as a detector should find them."""

    masks: Tensor
    """(k, h, w), true if an item covers at least half of a pixel; masks do not overlap."""
    boxes: Tensor
    """(k, 4): left, top, right and bottom edge, tight around the mask's pixels."""
    categories: Tensor
    """(k,), places in `CATEGORIES`."""


@dataclass(frozen=True)
class SceneBatch:
    """n scenes of k items each: the figures, the distractors, and last the cue."""

    labels: Tensor
    shapes: Tensor
    colours: Tensor
    centres: Tensor
    radii: Tensor
    angles: Tensor
    background: Tensor

    def coverage(self, size: int) -> Tensor:
        """The part of every pixel that each item covers, (n, k, size, size); items do not overlap."""
        return coverage(size, self.shapes, self.centres, self.radii, self.angles)

    def images(self, size: int) -> Tensor:
        """The pictures without noise, in [0, 1], (n, 3, size, size)."""
        place = torch.linspace(-1, 1, size)
        base, right, down = self.background.unbind(1)
        canvas = base[:, None, None] + right[:, None, None] * place + down[:, None, None] * place[:, None]
        canvas = canvas[:, None].expand(-1, 3, -1, -1)
        covered = self.coverage(size)
        uncovered = 1 - covered.sum(1, keepdim=True).clamp(max=1)
        return canvas * uncovered + torch.einsum("nkhw,nkc->nchw", covered, self.colours)

    def instances(self, index: int, size: int) -> Instances:
        """The items of one scene: figures and distractors by their shape, and the cue."""
        scene = self[index : index + 1]
        masks = scene.coverage(size)[0] >= 0.5
        (seen,) = torch.where(masks.flatten(1).any(1))
        # torchvision's boxes end at the last pixel's index, and these at its far edge.
        boxes = masks_to_boxes(masks[seen]) + torch.tensor([0.0, 0.0, 1.0, 1.0])
        return Instances(masks[seen], boxes, scene.shapes[0, seen])

    def __getitem__(self, scenes: slice) -> SceneBatch:
        return SceneBatch(**{field.name: getattr(self, field.name)[scenes] for field in fields(self)})


def sample_scenes(count: int, difficulty: Difficulty, generator: torch.Generator) -> SceneBatch:
    """Random scenes; the answer is drawn uniformly from the figures."""

    def uniform(*shape: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    def distinct(number: int, among: int) -> Tensor:
        return torch.rand(count, among, generator=generator).argsort(1)[:, :number]

    figures, distractors = difficulty.figures, difficulty.distractors
    shapes, colours = distinct(figures, len(CLASSES)), distinct(figures, difficulty.colours)
    answer = torch.randint(figures, (count, 1), generator=generator)
    other_shapes = torch.randint(len(CLASSES), (count, distractors), generator=generator)
    cue_shape = torch.full((count, 1), len(CLASSES))

    palette = torch.tensor(list(COLOURS.values()))
    tint = uniform(figures + 1, 3, low=-difficulty.tint, high=difficulty.tint)
    bright = palette[torch.cat([colours, colours.gather(1, answer)], 1)] + tint
    grey = uniform(distractors, 1, low=0.4, high=0.8).expand(-1, -1, 3)

    radii = torch.cat(
        [
            uniform(figures, low=difficulty.smallest, high=LARGEST),
            uniform(distractors, low=_DISTRACTOR_RADII[0], high=_DISTRACTOR_RADII[1]),
            torch.full((count, 1), _CUE_RADIUS),
        ],
        1,
    )
    centres = torch.cat(
        [
            _FIGURE_CELLS[distinct(figures, len(_FIGURE_CELLS))],
            _DISTRACTOR_CELLS[distinct(distractors, len(_DISTRACTOR_CELLS))],
            torch.full((count, 1, 2), _CUE_CENTRE),
        ],
        1,
    )
    mirrored = torch.randint(2, (count, 1, 2), generator=generator).bool()
    angles = uniform(figures + distractors, low=-difficulty.turn, high=difficulty.turn)
    level = uniform(1, low=0.1, high=0.3)
    slope = uniform(2, low=-difficulty.shading / 2, high=difficulty.shading / 2)
    return SceneBatch(
        labels=shapes.gather(1, answer)[:, 0],
        shapes=torch.cat([shapes, other_shapes, cue_shape], 1),
        colours=torch.cat([bright[:, :-1], grey, bright[:, -1:]], 1).clamp(0, 1),
        centres=torch.where(mirrored, 1 - centres, centres),
        radii=radii,
        angles=torch.cat([angles, torch.zeros(count, 1)], 1),
        background=torch.cat([level, slope], 1),
    )


def draw_scenes(
    count: int, *, size: int, difficulty: str, split: Split, seed: int
) -> Iterator[tuple[SceneBatch, Tensor]]:
    """The scenes of a split and their pictures, (n, 3, size, size) as uint8, at most `CHUNK` at a time."""
    wanted = DIFFICULTIES[difficulty]
    for first in range(0, count, CHUNK):
        generator = torch.Generator().manual_seed(seed_of(seed, split, first // CHUNK))
        scenes = sample_scenes(CHUNK, wanted, generator)
        noise = torch.randn(CHUNK, 3, size, size, generator=generator).mul_(wanted.noise)
        scenes = scenes[: count - first]
        pictures = torch.empty(len(scenes.labels), 3, size, size, dtype=torch.uint8)
        for part in (slice(start, start + _PAINTED) for start in range(0, len(pictures), _PAINTED)):
            painted = scenes[part].images(size)
            pictures[part] = (painted + noise[: len(pictures)][part]).clamp_(0, 1).mul_(255).round_()
        yield scenes, pictures


class Scenes(Dataset[tuple[Tensor, int]]):
    """`count` scenes of one split: (image as uint8, label); all are drawn at construction.

    >>> scenes = Scenes(4, size=48, difficulty="easy", split="val", seed=0)
    >>> image, label = scenes[0]
    >>> tuple(image.shape), CLASSES[label]
    ((3, 48, 48), 'disc')
    >>> [CATEGORIES[number] for number in scenes.instances(0).categories]
    ['ring', 'disc', 'cue']
    """

    def __init__(self, count: int, *, size: int, difficulty: str, split: Split, seed: int) -> None:
        self.size = size
        drawn = draw_scenes(count, size=size, difficulty=difficulty, split=split, seed=seed)
        chunks, images = zip(*drawn, strict=True)
        self.chunks: tuple[SceneBatch, ...] = chunks
        self.images = torch.cat(images)
        self.labels: list[int] = torch.cat([chunk.labels for chunk in self.chunks]).tolist()

    def instances(self, index: int) -> Instances:
        """The items to detect in an image."""
        chunk, place = divmod(range(len(self))[index], CHUNK)
        return self.chunks[chunk].instances(place, self.size)

    def name(self, index: int) -> str:
        """The scene's number, with as many digits as all have."""
        return f"scene {index:07}"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


def seed_of(seed: int, split: Split, chunk: int) -> int:
    """The seed of a chunk of a split; no two chunks share one."""
    return (seed * len(SPLITS) + SPLITS.index(split)) * 1_000_003 + chunk
