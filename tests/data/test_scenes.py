"""Scenes: what they depend on, where things lie, what the label says, and what cannot be known locally."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polynl.data.scenes import (
    CATEGORIES,
    CHUNK,
    CLASSES,
    COLOURS,
    DIFFICULTIES,
    GAP,
    LARGEST,
    SceneBatch,
    Scenes,
    sample_scenes,
)
from polynl.models.resnet import SmallResNet

PALETTE = torch.tensor(list(COLOURS.values()))
EVERY_DIFFICULTY = pytest.mark.parametrize("difficulty", DIFFICULTIES)


def scenes(count: int, *, difficulty: str = "easy", split: str = "train", seed: int = 0) -> Scenes:
    return Scenes(count, size=24, difficulty=difficulty, split=split, seed=seed)


def sampled(count: int, difficulty: str, seed: int = 0) -> SceneBatch:
    return sample_scenes(count, DIFFICULTIES[difficulty], torch.Generator().manual_seed(seed))


def colour_names(batch: SceneBatch) -> Tensor:
    """The nearest of `COLOURS` to every item's colour."""
    return (batch.colours[:, :, None] - PALETTE).square().sum(-1).argmin(-1)


def answers(batch: SceneBatch, figures: int) -> Tensor:
    """(n, figures): whether a figure has the cue's colour."""
    names = colour_names(batch)
    return names[:, :figures] == names[:, -1:]


def fair(coins: Tensor, p: float) -> bool:
    """The share of n coins that fall with probability p is within 5 √(p(1 - p)/n), but for 1 in a million."""
    return abs(coins.float().mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / coins.numel())


# What a scene depends on


@EVERY_DIFFICULTY
def test_the_same_seed_gives_the_same_bytes(difficulty: str) -> None:
    first, second = (scenes(30, difficulty=difficulty, seed=7) for _ in range(2))
    assert torch.equal(first.images, second.images)
    assert first.labels == second.labels
    assert first.images.dtype == torch.uint8
    assert first.images.shape == (30, 3, 24, 24)
    other = scenes(30, difficulty=difficulty, seed=8)
    assert not torch.equal(first.images, other.images)


def test_an_image_does_not_depend_on_how_many_there_are() -> None:
    many = scenes(2 * CHUNK + 3)
    for count in (1, CHUNK, CHUNK + 30):
        few = scenes(count)
        assert len(few) == count
        assert torch.equal(few.images, many.images[:count])
        assert few.labels == many.labels[:count]
    index = CHUNK + 29
    assert torch.equal(few.instances(index).masks, many.instances(index).masks)
    assert torch.equal(few.instances(-1).masks, few.instances(index).masks)
    with pytest.raises(IndexError):
        few.instances(len(few))


def test_no_image_is_in_two_splits_or_seeds_or_chunks() -> None:
    parts = [scenes(CHUNK + 50, split=split, seed=seed) for split in ("train", "val") for seed in (0, 1, 2)]
    images = {image.numpy().tobytes() for part in parts for image in part.images}
    assert len(images) == 6 * (CHUNK + 50)


# What the label says


@EVERY_DIFFICULTY
def test_the_label_is_the_shape_with_the_cues_colour(difficulty: str) -> None:
    figures = DIFFICULTIES[difficulty].figures
    batch = sampled(500, difficulty)
    for shapes, chosen, label in zip(
        batch.shapes.tolist(), answers(batch, figures).tolist(), batch.labels.tolist(), strict=True
    ):
        assert chosen.count(True) == 1, "figures have different colours"
        assert shapes[chosen.index(True)] == label
        assert len(set(shapes[:figures])) == figures, "and different shapes"
        assert CATEGORIES[shapes[-1]] == "cue"
        assert all(shape < len(CLASSES) for shape in shapes[:-1])


@EVERY_DIFFICULTY
def test_who_sees_everything_reads_the_label_off_the_pixels(difficulty: str) -> None:
    data = Scenes(60, size=64, difficulty=difficulty, split="val", seed=3)
    figures = DIFFICULTIES[difficulty].figures
    for index in range(60):
        (image, label), items = data[index], data.instances(index)
        means = torch.stack([image[:, mask].float().mean(1) for mask in items.masks])
        nearest = (means[:figures] - means[-1]).square().sum(1).argmin()
        assert items.categories[nearest] == label


@EVERY_DIFFICULTY
def test_the_answer_is_any_figure_whatever_it_looks_like(difficulty: str) -> None:
    figures, count = DIFFICULTIES[difficulty].figures, 20_000
    batch = sampled(count, difficulty)
    chosen = answers(batch, figures)
    local = {
        "place in the list": torch.arange(figures).expand(count, -1),
        "shape": batch.shapes[:, :figures],
        "colour": colour_names(batch)[:, :figures],
        "column": (batch.centres[:, :figures, 0] * 3).long(),
        "row": (batch.centres[:, :figures, 1] * 3).long(),
        "size": batch.radii[:, :figures].argsort(1).argsort(1),
        "turn": (batch.angles[:, :figures] > 0).long(),
        "brightness": batch.colours[:, :figures].sum(-1).argsort(1).argsort(1),
        "corner of the cue": (batch.centres[:, -1:] > 0.5).long().sum(-1).expand(-1, figures),
    }
    for name, kinds in local.items():
        for kind in kinds.unique().tolist():
            assert fair(chosen[kinds == kind], 1 / figures), (name, kind)
    colours = DIFFICULTIES[difficulty].colours
    for names, number in ((batch.labels, len(CLASSES)), (colour_names(batch)[:, -1], colours)):
        assert all(fair(names == name, 1 / number) for name in range(number))


# Where things lie


def outermost(batch: SceneBatch, difficulty: str) -> SceneBatch:
    """The same scenes with the figures as large and as turned as they get."""
    wanted = DIFFICULTIES[difficulty]
    radii, angles = batch.radii.clone(), batch.angles.clone()
    radii[:, : wanted.figures] = LARGEST
    radii[:, wanted.figures : -1] = 0.095
    angles[:, :-1] = wanted.turn * angles[:, :-1].sign()
    return replace(batch, radii=radii, angles=angles)


def extents(masks: Tensor) -> Tensor:
    """First and last column, first and last row: (4, …)."""
    size = masks.shape[-1]
    edges = []
    for seen in (masks.any(-2), masks.any(-1)):
        edges += [seen.int().argmax(-1), size - 1 - seen.flip(-1).int().argmax(-1)]
    return torch.stack(edges)


def pixels_between_cue_and_figures(batch: SceneBatch, figures: int, size: int) -> int:
    """Over the axis on which they are further apart, as a square window has to span both."""
    left, right, top, bottom = extents(batch.coverage(size) > 0)
    apart = [
        torch.maximum(low[:, :figures] - high[:, -1:], low[:, -1:] - high[:, :figures]) - 1
        for low, high in ((left, right), (top, bottom))
    ]
    return int(torch.maximum(*apart).min())


@pytest.mark.parametrize(("size", "count"), [(40, 300), (64, 300), (128, 60), (1024, 2)])
@EVERY_DIFFICULTY
def test_the_gap_is_as_wide_as_promised(difficulty: str, size: int, count: int) -> None:
    """`coverage` blurs an edge over one pixel: a pixel is touched if its centre is less than half a pixel
    outside. Its far edge is then less than one pixel outside. With an edge on each side of the gap, less than
    two pixels of it are touched. (Where an edge meets the axis at a corner, it is a little more, which the
    allowance in `_REACH` outweighs.)"""
    batch = outermost(sampled(count, difficulty), difficulty)
    gap = pixels_between_cue_and_figures(batch, DIFFICULTIES[difficulty].figures, size)
    assert gap >= GAP * size - 2
    assert gap <= GAP * size + 0.06 * size, "nor is room wasted"


@EVERY_DIFFICULTY
def test_no_window_of_the_small_resnet_sees_cue_and_figure(difficulty: str) -> None:
    torch.manual_seed(0)
    model = SmallResNet(depth=1, width=4).eval()
    for parameter in model.parameters():
        parameter.data.abs_()  # so that no ReLU hides a path
    image = torch.rand(1, 3, 64, 64, requires_grad=True)
    middle = model.features(image)[0, :, 8, 8].sum()
    (gradient,) = torch.autograd.grad(middle, image)
    left, right, top, bottom = extents(gradient[0].abs().sum(0) > 0).tolist()
    window = right - left + 1
    assert window == bottom - top + 1 == 19
    assert window < GAP * 40
    batch = outermost(sampled(300, difficulty, seed=1), difficulty)
    between = pixels_between_cue_and_figures(batch, DIFFICULTIES[difficulty].figures, 40)
    assert between + 2 > window, "to see both is to see what is between them and a pixel of each"


@pytest.mark.parametrize(("size", "count"), [(40, 250), (128, 50)])
@EVERY_DIFFICULTY
def test_items_do_not_overlap_and_lie_inside(difficulty: str, size: int, count: int) -> None:
    wanted = DIFFICULTIES[difficulty]
    masks = outermost(sampled(count, difficulty), difficulty).coverage(size) >= 0.5
    assert masks.shape[:2] == (count, wanted.figures + wanted.distractors + 1)
    assert masks.flatten(2).any(2).all()
    assert masks.sum(1).max() == 1
    inner = masks[:, :, 1:-1, 1:-1]
    assert masks.sum() == inner.sum() or size < 128, "what leaves the image would be on its border"
    left, right, top, bottom = extents(masks)
    assert (right - left).max() <= 2.2 * LARGEST * size
    assert (bottom - top).max() <= 2.2 * LARGEST * size


@EVERY_DIFFICULTY
def test_instances_are_the_items(difficulty: str) -> None:
    data = Scenes(10, size=50, difficulty=difficulty, split="train", seed=4)
    wanted = DIFFICULTIES[difficulty]
    for index in range(10):
        items = data.instances(index)
        assert items.masks.dtype == torch.bool
        assert items.masks.shape == (wanted.figures + wanted.distractors + 1, 50, 50)
        assert torch.equal(items.categories, data.chunks[0].shapes[index])
        for mask, (x0, y0, x1, y1) in zip(items.masks, items.boxes.long().tolist(), strict=True):
            assert mask.sum() == mask[y0:y1, x0:x1].sum()
            box = mask[y0:y1, x0:x1]
            assert box[0].any() and box[-1].any() and box[:, 0].any() and box[:, -1].any()  # noqa: PT018


def test_what_covers_no_pixel_is_no_instance() -> None:
    batch = sampled(1, "easy")
    radii = batch.radii.clone()
    radii[0, 0] = 1e-3
    items = replace(batch, radii=radii).instances(0, 16)
    assert torch.equal(items.categories, batch.shapes[0, 1:])
    assert items.masks.shape == (2, 16, 16)
    assert items.boxes.shape == (2, 4)


# What cannot be known locally


def local_evidence(batch: SceneBatch, figures: int) -> Tensor:
    """How often there is a figure of each shape and colour, and which colour the cue has: all that windows
    which see no two items at once can say, added up."""
    names = colour_names(batch)
    kinds = batch.shapes[:, :figures] * len(COLOURS) + names[:, :figures]
    counts = F.one_hot(kinds, len(CLASSES) * len(COLOURS)).sum(1)
    return torch.cat([counts, F.one_hot(names[:, -1], len(COLOURS))], 1).float()


def logistic_regression(x: Tensor, labels: Tensor) -> Tensor:
    weights = torch.zeros(x.shape[1], len(CLASSES), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weights, labels)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return weights.detach()


@EVERY_DIFFICULTY
def test_guessing_is_the_best_sum_of_local_evidence(difficulty: str) -> None:
    """The mean cross entropy of logits F(figures) + G(cue) is convex in F and G. It has its minimum where the
    residuals, guessed minus true probability, add up to zero for every F, so for each set of figures, and for
    every G, so for each colour of the cue. To guess among the figures does that if each of them is the answer
    equally often: in every set, and with every colour of the cue.

    χ² of m fair dice with k sides has mean m(k - 1) and at most twice that as its variance."""
    figures, count = DIFFICULTIES[difficulty].figures, 20_000
    batch = sampled(count, difficulty, seed=4)
    names = colour_names(batch)
    kinds, order = (batch.shapes[:, :figures] * len(COLOURS) + names[:, :figures]).sort(1)
    sets, which = kinds.unique(dim=0, return_inverse=True)
    answer = answers(batch, figures).gather(1, order).int().argmax(1)
    thrown = torch.zeros(len(sets), figures).index_put_((which, answer), torch.ones(count), accumulate=True)
    expected = thrown.mean(1, keepdim=True)
    chi2, mean = ((thrown - expected) ** 2 / expected).sum().item(), len(sets) * (figures - 1)
    assert abs(chi2 - mean) < 5 * math.sqrt(2 * mean)
    for cue in range(DIFFICULTIES[difficulty].colours):
        for shape in range(len(CLASSES)):
            there = (names[:, -1] == cue) & (batch.shapes[:, :figures] == shape).any(1)
            assert fair(batch.labels[there] == shape, 1 / figures), (cue, shape)


@EVERY_DIFFICULTY
def test_a_classifier_of_local_evidence_learns_to_guess(difficulty: str) -> None:
    """Its answers differ from guessing by the noise in its weights alone. With two figures, each pair of
    shapes with a pair of colours moves its share of right answers by a quarter up or down: m of them together
    by less than 6 · 1/4 / √m, and with three figures by less, since they have more pairs."""
    figures, colours = DIFFICULTIES[difficulty].figures, DIFFICULTIES[difficulty].colours
    pairs = math.comb(len(CLASSES), 2) * math.comb(colours, 2)
    known, fresh = sampled(20_000, difficulty, seed=1), sampled(20_000, difficulty, seed=2)
    weights = logistic_regression(local_evidence(known, figures), known.labels)
    logits = local_evidence(fresh, figures) @ weights
    accuracy = (logits.argmax(1) == fresh.labels).float().mean().item()
    assert abs(accuracy - 1 / figures) < 6 / 4 / math.sqrt(pairs)
    losses = F.cross_entropy(logits, fresh.labels, reduction="none")
    assert losses.mean() > math.log(figures) - 5 * losses.std() / len(losses) ** 0.5
    named = (fresh.shapes[:, :figures] == logits.argmax(1)[:, None]).any(1)
    assert named.all(), "it has learnt all that there is to learn: it names a figure that is there"


def test_some_sums_of_local_evidence_are_right_more_often_than_guesses() -> None:
    """Cross entropy leads to none of them, but they are why 1 in `figures` is no bound on right answers: with
    colours in a row, say the later of two shapes if the cue's colour is its colour or comes after it. That is
    right if the cue means this shape, and else if its colour comes before: 3 times in 4."""
    batch = sampled(20_000, "easy", seed=3)
    shape, colour = (torch.arange(36) // 6)[:, None], (torch.arange(36) % 6)[:, None]
    candidate, cue = torch.arange(6), torch.arange(6)[:, None]
    figures = 100.0 * (shape == candidate) + (shape - candidate).clamp(min=0) * (colour - 0.5)
    weights = torch.cat([figures, (cue * candidate).float()])
    assert fair((local_evidence(batch, 2) @ weights).argmax(1) == batch.labels, 0.75)
