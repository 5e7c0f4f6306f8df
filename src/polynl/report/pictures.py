"""Explanations of the trained networks of a study: Grad-CAM, X, Y and Z, influence maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polynl.errors import RunStoppedError, SettingsError
from polynl.explain.explanation import Explanation, Query, explain_image, highest
from polynl.explain.networks import ExplainedNetwork, network_from_checkpoint
from polynl.report.images import SMALL, image_uri, overlay_uri, stretched
from polynl.report.influence import cell_at, cell_maps, packed
from polynl.results.charts import EMPHASIS
from polynl.results.formats import number
from polynl.results.study import Study, Training, Variant
from polynl.tasks.base import DetectionTask
from polynl.train.checkpoint import BEST_WEIGHTS, LAST_WEIGHTS

IMAGES = 5
# The influence maps of a large network take a minute per image.
LARGE_IMAGES = 2


@dataclass(frozen=True)
class Picture:
    """An image of the page with its caption and alternative text."""

    uri: str
    caption: str
    alt: str


@dataclass(frozen=True)
class PictureGrid:
    """Pictures under column headings, a row per image."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Picture]]


@dataclass
class Pictures:
    """All pictures of a study; `missing` says which networks have none, and why."""

    title: str
    detects: bool = False
    grad_cam: PictureGrid | None = None
    norms: list[PictureGrid] = field(default_factory=list)
    influence: dict[str, Any] | None = None
    without_influence: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Sample:
    """A validation image, as the networks see it."""

    image: Tensor
    shown: Picture
    label: str | None
    """The class; for classifiers only."""


@dataclass(frozen=True)
class _Network:
    """The network of a variant, and its explanation of every image."""

    variant: Variant
    network: ExplainedNetwork
    explanations: Sequence[Explanation]


def study_pictures(study: Study) -> Pictures:
    """The pictures of the first training of each variant, on validation images."""
    pictures = Pictures(study.title, detects=issubclass(study.task_class, DetectionTask))
    samples: list[_Sample] = []
    networks = []
    for variant in study.variants:
        try:
            explained = _explained(variant)
            samples = samples or _samples(explained, variant.recipe["data"].get("root"))
            explanations = [explain_image(explained, sample.image, Query()) for sample in samples]
            networks.append(_Network(variant, explained, explanations))
        except (SettingsError, RunStoppedError, OSError) as error:
            pictures.missing.append(f"{variant.label}: {error}")
    if networks:
        pictures.grad_cam = _grad_cam(study.title, networks, samples)
        with_block = [network for network in networks if network.network.block is not None]
        # The page opens the first one.
        with_block.sort(key=lambda network: network.variant.row != EMPHASIS)
        pictures.norms = [grid for network in with_block if (grid := _norms(network, samples)).rows]
        pictures.influence = _influence(with_block, samples, pictures.without_influence)
    return pictures


def weights_file(training: Training) -> Path | None:
    """The weights of the best epoch, else of the last."""
    files = (training.folder / name for name in (BEST_WEIGHTS, LAST_WEIGHTS))
    return next((file for file in files if file.is_file()), None)


def _explained(variant: Variant) -> ExplainedNetwork:
    weights = weights_file(variant.trainings[0])
    if weights is None:
        raise SettingsError(f"there are no weights in {variant.trainings[0].folder}.")
    # Validation images are already cropped and resized.
    unchanged: Any = nn.Identity()
    return replace(network_from_checkpoint(weights), view=unchanged)


def _samples(network: ExplainedNetwork, root: str | None) -> list[_Sample]:
    """Images spread evenly over the validation set, which may be sorted by class."""
    task = network.task
    assert task is not None, "the network of a run has one"
    try:
        task.check(training=False)
        images = task.val_set()
    except SettingsError as error:
        # Without hints at recipe keys, which a report does not take.
        if root is None or Path(root).is_absolute() or Path(root).is_dir():
            raise SettingsError(error.message) from None
        where = "run polynl report in the folder where it was trained"
        raise SettingsError(f"{error.message.rstrip('.')}: {where}.") from None
    found = []
    for place in dict.fromkeys(round(k * (len(images) - 1) / (IMAGES - 1)) for k in range(IMAGES)):
        entry = images[place]
        if isinstance(entry, tuple):
            image, target = entry
            label = None if network.detects else network.labels[int(target)]
            caption = f"image {place + 1:,}" if label is None else label
            alt = caption if label is None else f"an image of {label}"
            found.append(_Sample(image, Picture(image_uri(image), caption, alt), label))
    if not found:
        raise SettingsError("none of the images can be read.")
    return found


def _grad_cam(title: str, networks: Sequence[_Network], samples: Sequence[_Sample]) -> PictureGrid:
    columns = [[sample.shown for sample in samples]]
    for network in networks:
        column = []
        for sample, found in zip(samples, network.explanations, strict=True):
            # A detector that finds nothing has no map.
            uri = sample.shown.uri
            if found.cam is not None:
                uri = overlay_uri(found.image, stretched(found.cam.cpu(), low=0.0), found.box)
            right = "" if sample.label is None else "✓ " if found.label == sample.label else "✗ "
            alt = f"Grad-CAM of {network.variant.label} on {sample.shown.alt}: {found.said}"
            column.append(Picture(uri, f"{right}{found.said}", alt))
        columns.append(column)
    headings = ["image", *(network.variant.label for network in networks)]
    return PictureGrid(title, headings, list(zip(*columns, strict=True)))


def _norms(network: _Network, samples: Sequence[_Sample]) -> PictureGrid:
    rows, label = [], network.variant.label
    for sample, explanation in zip(samples, network.explanations, strict=True):
        if explanation.norms is None:
            continue
        row = [sample.shown]
        for name, values in zip("XYZ", (norm.cpu() for norm in explanation.norms), strict=True):
            ends = f"{number(float(values.min()))} to {number(float(values.max()))}"
            alt = f"norm of {name} in {label} at every position of {sample.shown.alt}: {ends}"
            row.append(Picture(overlay_uri(explanation.image, stretched(values), explanation.box), ends, alt))
        rows.append(row)
    return PictureGrid(label, ["image", "‖X‖, input", "‖Y‖, added", "‖Z‖, output"], rows)


def _influence(
    networks: Sequence[_Network], samples: Sequence[_Sample], without: list[str]
) -> dict[str, Any] | None:
    """The maps of every block that has them, as the page's script reads them."""
    chosen = samples if max(samples[0].image.shape[1:]) <= SMALL else samples[:LARGE_IMAGES]
    blocks = []
    for network in networks:
        explained = network.network
        assert explained.block is not None
        maps = []
        try:
            for sample, found in zip(chosen, network.explanations, strict=False):
                cells = cell_maps(explained.model, explained.inputs(sample.image), explained.block)
                box = {} if found.box is None else {"box": found.box, "found": found.said}
                # Where the block adds most, as a place where it adds little has nothing to show.
                most = None if found.norms is None else highest(found.norms.y, found.image)
                start = cell_at(found.box or most, found.image.shape[1:], cells.shape[:2])
                maps.append(packed(cells.cpu()) | {"start": start} | box)
            blocks.append({"label": network.variant.label, "maps": maps})
        except ValueError as error:
            without.append(f"{str(error).rstrip('.')}.")
    images = [
        {"uri": s.shown.uri, "label": s.shown.caption, "size": tuple(s.image.shape[1:])} for s in chosen
    ]
    return {"images": images, "blocks": blocks} if blocks else None
