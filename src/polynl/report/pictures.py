"""What the trained networks of a study look at: Grad-CAM, X, Y and Z, influence maps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polynl.errors import RunStoppedError, SettingsError
from polynl.explain.explanation import Explanation, Query, explain_image
from polynl.explain.networks import ExplainedNetwork, network_from_checkpoint
from polynl.report.chart import number
from polynl.report.images import SMALL, image_uri, overlay_uri, stretched
from polynl.report.influence import cell_maps, packed
from polynl.results.load import Study, Variant

IMAGES = 5
# The influence maps of a large network take a minute for an image.
LARGE_IMAGES = 2


@dataclass(frozen=True)
class Picture:
    """An image in a page, what is said below it, and what it shows, for those who cannot see it."""

    uri: str
    caption: str
    alt: str


@dataclass(frozen=True)
class PictureGrid:
    """Pictures in rows, a row for each image, under headings."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Picture]]


@dataclass
class Pictures:
    """All pictures of a study; `missing` says why there are none, or not of all."""

    title: str
    detects: bool = False
    grad_cam: PictureGrid | None = None
    norms: list[PictureGrid] = field(default_factory=list)
    influence: dict[str, Any] | None = None
    without_influence: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Sample:
    """An image that was scored on, as the networks see it."""

    image: Tensor
    caption: str
    named: str
    label: str | None = None
    """The class; images of detectors have none."""


@dataclass(frozen=True)
class _Looked:
    """A variant's network, and what it says of every image."""

    variant: Variant
    network: ExplainedNetwork
    explanations: Sequence[Explanation]


def pictures_of(study: Study) -> Pictures:
    """Of the first training of each variant, on images that it was scored on."""
    pictures = Pictures(study.title, detects=study.task != "classification")
    samples: list[_Sample] = []
    looked = []
    for variant in study.variants:
        try:
            network = _network(variant)
            samples = samples or _samples(network, variant.recipe["data"].get("root"))
            explanations = [explain_image(network, sample.image, Query()) for sample in samples]
            looked.append(_Looked(variant, network, explanations))
        except (SettingsError, RunStoppedError, OSError) as error:
            pictures.missing.append(f"{variant.label}: {error}")
    if looked:
        pictures.grad_cam = _grad_cam(study.title, looked, samples)
        with_block = [one for one in looked if one.network.block is not None]
        # The page opens with the block that it is about.
        with_block.sort(key=lambda one: one.variant.row != "poly_nl")
        pictures.norms = [grid for one in with_block if (grid := _norms(one, samples)).rows]
        pictures.influence = _influence(with_block, samples, pictures.without_influence)
    return pictures


def _network(variant: Variant) -> ExplainedNetwork:
    folder, weights = variant.trainings[0].folder, variant.trainings[0].weights()
    if weights is None:
        raise SettingsError(f"there are no weights in {folder}.")
    # The images that it is scored on are cut out already, as it sees them.
    as_it_is: Any = nn.Identity()
    return replace(network_from_checkpoint(weights), view=as_it_is)


def _samples(network: ExplainedNetwork, root: str | None) -> list[_Sample]:
    """Images spread over those that are scored on, which folders have sorted by class."""
    task = network.task
    assert task is not None, "the network of a run has one"
    try:
        task.check(training=False)
        images = task.val_set()
    except SettingsError as error:
        raise SettingsError(_without_images(str(error), root)) from None
    places = dict.fromkeys(round(k * (len(images) - 1) / (IMAGES - 1)) for k in range(IMAGES))
    entries = [(place, images[place]) for place in places]
    found = [_sample(network, place, *entry) for place, entry in entries if isinstance(entry, tuple)]
    if not found:
        raise SettingsError("there is no image that can be read.")
    return found


def _without_images(error: str, root: str | None) -> str:
    """What is wrong with the data, without the keys of recipes to give instead: a report takes none."""
    wrong = re.split(r" Give yours|\n", error)[0]
    if root is None or Path(root).is_absolute() or Path(root).is_dir():
        return wrong
    return f"{wrong.rstrip('.')}: run polynl report in the folder that it was trained in."


def _sample(network: ExplainedNetwork, place: int, image: Tensor, target: Any) -> _Sample:
    if network.detects:
        return _Sample(image, f"image {place + 1:,}", f"image {place + 1:,}")
    label = network.labels[int(target)]
    return _Sample(image, label, f"an image of {label}", label)


def _original(sample: _Sample) -> Picture:
    return Picture(image_uri(sample.image), sample.caption, sample.named)


def _grad_cam(title: str, looked: Sequence[_Looked], samples: Sequence[_Sample]) -> PictureGrid:
    columns = [[_original(sample) for sample in samples]]
    for one in looked:
        column = []
        for sample, said in zip(samples, one.explanations, strict=True):
            alt = f"Grad-CAM of {one.variant.label} on {sample.named}: {said.said}"
            column.append(Picture(_cam_uri(said), _judged(said, sample), alt))
        columns.append(column)
    headings = ["image", *(one.variant.label for one in looked)]
    return PictureGrid(title, headings, list(zip(*columns, strict=True)))


def _cam_uri(said: Explanation) -> str:
    """Of a detector that finds nothing, the image alone."""
    if said.cam is None:
        return image_uri(said.image)
    return overlay_uri(said.image, stretched(said.cam.cpu(), low=0.0), said.box)


def _judged(said: Explanation, sample: _Sample) -> str:
    """What the network says; of a class, whether that is right."""
    if sample.label is None:
        return said.said
    return f"{'✓' if said.label == sample.label else '✗'} {said.said}"


def _norms(one: _Looked, samples: Sequence[_Sample]) -> PictureGrid:
    label = one.variant.label
    rows = []
    for sample, said in zip(samples, one.explanations, strict=True):
        row = [_original(sample)]
        if said.norms is None:
            continue
        for name, values in (("X", said.norms.x), ("Y", said.norms.y), ("Z", said.norms.z)):
            values = values.cpu()
            ends = f"{number(float(values.min()))} to {number(float(values.max()))}"
            alt = f"norm of {name} in {label} at every position of {sample.named}: {ends}"
            row.append(Picture(overlay_uri(said.image, stretched(values), said.box), ends, alt))
        rows.append(row)
    return PictureGrid(label, ["image", "‖X‖, input", "‖Y‖, added", "‖Z‖, output"], rows)


def _influence(
    looked: Sequence[_Looked], samples: Sequence[_Sample], without: list[str]
) -> dict[str, Any] | None:
    """For every block that has maps those of some images, as the page's script reads them."""
    chosen = samples if max(samples[0].image.shape[1:]) <= SMALL else samples[:LARGE_IMAGES]
    blocks = []
    for one in looked:
        try:
            maps = [_map(one, sample, said) for sample, said in zip(chosen, one.explanations, strict=False)]
        except ValueError as error:
            # The rest of the message tells what to take instead.
            without.append(f"{str(error).partition('. ')[0].rstrip('.')}.")
            continue
        blocks.append({"label": one.variant.label, "maps": maps})
    if not blocks:
        return None
    images = [{"uri": image_uri(s.image), "label": s.caption, "size": s.image.shape[1:]} for s in chosen]
    return {"images": images, "blocks": blocks}


def _map(one: _Looked, sample: _Sample, said: Explanation) -> Mapping[str, Any]:
    """The maps of an image, and the box of what the network has found in it."""
    assert one.network.block is not None
    maps = cell_maps(one.network.model, one.network.inputs(sample.image), one.network.block)
    return packed(maps.cpu()).to_json() | ({} if said.box is None else {"box": said.box, "found": said.said})
