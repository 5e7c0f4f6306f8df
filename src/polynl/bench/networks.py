"""`polynl bench nets`: the cost of a block in a whole network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polynl.bench.cases import BY_NAME
from polynl.bench.detectors import (
    COARSEST_STRIDE,
    NetworkAlone,
    face_detector_of_side,
    faster_rcnn_detector,
    mask_rcnn_detector,
)
from polynl.bench.runner import measure_points, random_maps, start_or_resume, write_tables
from polynl.bench.settings import NetSettings
from polynl.errors import SettingsError, check_choices, sentence
from polynl.models.libraries import LIBRARIES, library_network
from polynl.models.resnet import PLACEMENTS, insert_at, resnet
from polynl.results.benchmark import Point, Results
from polynl.results.tables import network_table

PLAIN, ALONE = "plain", "alone"
BlockBuilder = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Network:
    """A network to insert blocks into: `make` builds it with a block at a placement, or without a block.

    The module is built for square images of a given side. It maps a batch of them to one tensor, from which
    the backward pass starts in train mode.
    """

    label: str
    make: Callable[[BlockBuilder | None, str, int], nn.Module]
    least_side: int = 1
    alone: Callable[[Any], nn.Module] | None = None
    """For detectors: the network without post-processing, which gets a row of its own."""

    def build(self, block: BlockBuilder | None, placement: str, side: int = 224) -> nn.Module:
        """See `make`; images that are too small raise a SettingsError."""
        if side < self.least_side:
            raise SettingsError(f"--side {side}: {self.label} needs images of at least {self.least_side}.")
        return self.make(block, placement, side)


def _resnet(arch: str, block: BlockBuilder | None, placement: str, _: int) -> nn.Module:
    model = resnet(arch)
    if block is not None:
        insert_at(model, block, placement)
    return model


def _of_library(name: str, block: BlockBuilder | None, placement: str, side: int) -> nn.Module:
    """A classifier of torchvision or timm."""
    example = torch.zeros(1, 3, side, side)
    try:
        model = library_network(name)
        if block is not None:
            insert_at(model, block, placement, example=example)
    except ValueError as error:
        modules = "" if block is None else " Choose modules of the network: --placements MODULE …"
        raise SettingsError(f"--network {name}: {sentence(error)}{modules}") from None
    with torch.no_grad():
        if block is None and not isinstance(model.eval()(example), Tensor):
            raise SettingsError(f"--network {name}: only classifiers can be measured by their names.")
    return model


def _networks() -> Iterator[tuple[str, Network]]:
    for depth in (18, 50, 101):
        yield f"resnet{depth}", Network(f"ResNet-{depth}", partial(_resnet, f"resnet{depth}"))
    for name, label, make, alone in (
        ("mask_rcnn", "Mask R-CNN", mask_rcnn_detector, None),
        ("faster_rcnn", "Faster R-CNN", faster_rcnn_detector, None),
        ("faces", "Face detector", face_detector_of_side, NetworkAlone),
    ):
        for depth in (18, 50):
            made = partial(make, f"resnet{depth}")
            yield f"{name}_resnet{depth}", Network(f"{label}, ResNet-{depth}", made, COARSEST_STRIDE, alone)


NETWORKS = dict(_networks())


def run_networks(settings: NetSettings, console: Console) -> Results:
    """Measure the plain network and every variant, then show and save the table."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    network = _selected(settings)
    variants = selected_variants(settings)
    path = settings.out / "nets.json"
    results = start_or_resume(path, settings, kind="nets", methods={}, reference=PLAIN)
    models = {method: _built(network, *variant, settings) for method, variant in variants.items()}
    labels = {PLAIN: network.label}
    labels |= {name: f"{BY_NAME[b].label} at {p}" for name, (b, p) in variants.items() if b is not None}
    if network.alone is not None:
        models[ALONE], labels[ALONE] = network.alone(models[PLAIN]), "without post-processing"
    for method, label in labels.items():
        x = torch.randn(1, 3, settings.side, settings.side)
        results.methods[method] = {"label": label, **count_costs(models[method], x)}

    def build(method: str, point: Point) -> tuple[nn.Module, Tensor]:
        return models[method], random_maps((point.batch, 3, point.side, point.side), settings)

    points = [Point("forward", batch, settings.side) for batch in sorted({1, settings.batch})]
    if settings.training:
        points.append(Point("training", settings.batch, settings.side))
    measure_points(results, path, points, build, lambda *_: None, settings, console)
    write_tables(results, path, [network_table(results)], console)
    return results


def _selected(settings: NetSettings) -> Network:
    name = settings.network
    if "/" in name:
        return Network(name, partial(_of_library, name))
    check_choices([name], [*NETWORKS, *(f"{library}/NAME" for library in LIBRARIES)], "network")
    check_choices(settings.placements, list(PLACEMENTS), "placement")
    return NETWORKS[name]


def selected_variants(settings: NetSettings) -> dict[str, tuple[str | None, str]]:
    """Block and placement of every variant, by name; the plain network comes first."""
    missing = [block for block in settings.blocks if not BY_NAME[block].available()]
    if missing:
        raise SettingsError(
            f"--blocks {missing[0]}: the package {BY_NAME[missing[0]].package} is not installed."
        )
    pairs = [(block, placement) for placement in settings.placements for block in settings.blocks]
    return {PLAIN: (None, settings.placements[0])} | {f"{b}@{p}": (b, p) for b, p in pairs}


def _built(network: Network, block: str | None, placement: str, settings: NetSettings) -> nn.Module:
    torch.manual_seed(settings.seed)
    return network.build(None if block is None else BY_NAME[block].build, placement, settings.side)


def count_costs(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """The parameters, and the multiply-adds by torch's counter, which sees matrix products only."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(x)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "multiply_adds": counter.get_total_flops() // 2,
    }
