"""`polynl bench nets`: what a block costs in a whole network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polynl.bench.cases import BY_NAME
from polynl.bench.detectors import COARSEST_STRIDE, NetworkAlone, face_detector_of_side, mask_rcnn_detector
from polynl.bench.runner import maps, measured, opened
from polynl.bench.settings import NetSettings
from polynl.errors import SettingsError, check_choices
from polynl.files import write_atomically
from polynl.models.resnet import PLACEMENTS, insert_at, resnet
from polynl.results.benchmark import Measurement, Point, Results
from polynl.results.tables import (
    NOT_MEASURED,
    Table,
    as_markdown,
    as_rich,
    counted,
    duration,
    size_of,
    skipped_lines,
)

PLAIN, ALONE = "plain", "alone"
BlockBuilder = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Network:
    """A network that blocks go into: `make` puts one at a placement, or leaves it plain.

    What it makes is for images of a side, and maps a batch of them to one tensor, from which the backward
    pass begins in train mode.
    """

    label: str
    make: Callable[[BlockBuilder | None, str, int], nn.Module]
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    input_channels: int = 3
    least_side: int = 1
    alone: Callable[[Any], nn.Module] | None = None
    """Of a detector, what is left of it without post-processing; its row tells what that takes."""

    def build(self, block: BlockBuilder | None, placement: str, side: int = 224) -> nn.Module:
        """See `make`; a SettingsError for images that are too small."""
        if side < self.least_side:
            raise SettingsError(f"--side {side}: {self.label} needs images of at least {self.least_side}.")
        return self.make(block, placement, side)


def _resnet(arch: str, label: str) -> Network:
    def make(block: BlockBuilder | None, placement: str, _: int) -> nn.Module:
        model = resnet(arch)
        if block is not None:
            insert_at(model, block, placement)
        return model

    return Network(label, make)


def _mask_rcnn(arch: str, label: str) -> Network:
    return Network(label, partial(mask_rcnn_detector, arch), least_side=COARSEST_STRIDE)


def _faces(arch: str, label: str) -> Network:
    make = partial(face_detector_of_side, arch)
    return Network(label, make, least_side=COARSEST_STRIDE, alone=NetworkAlone)


NETWORKS = {
    "resnet18": _resnet("resnet18", "ResNet-18"),
    "resnet50": _resnet("resnet50", "ResNet-50"),
    "resnet101": _resnet("resnet101", "ResNet-101"),
    "mask_rcnn_resnet18": _mask_rcnn("resnet18", "Mask R-CNN, ResNet-18"),
    "mask_rcnn_resnet50": _mask_rcnn("resnet50", "Mask R-CNN, ResNet-50"),
    "faces_resnet18": _faces("resnet18", "Face detector, ResNet-18"),
    "faces_resnet50": _faces("resnet50", "Face detector, ResNet-50"),
}


def run_networks(settings: NetSettings, console: Console) -> Results:
    """Measure the plain network and every variant, then show and save the table."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    (name,) = check_choices([settings.network], list(NETWORKS), "network")
    network = NETWORKS[name]
    check_choices(settings.placements, network.placements, "placement")
    variants = selected_variants(settings)
    path = settings.out / "nets.json"
    results = opened(path, settings, kind="nets", methods={}, reference=PLAIN)
    models = {method: _built(network, *variant, settings) for method, variant in variants.items()}
    labels = {PLAIN: network.label}
    labels |= {name: f"{BY_NAME[b].label} at {p}" for name, (b, p) in variants.items() if b is not None}
    if network.alone is not None:
        models[ALONE], labels[ALONE] = network.alone(models[PLAIN]), "without post-processing"
    for method, label in labels.items():
        shape = (1, network.input_channels, settings.side, settings.side)
        results.methods[method] = {"label": label, **counts(models[method], torch.randn(shape))}

    def build(method: str, point: Point) -> tuple[nn.Module, Tensor]:
        x = maps((point.batch, network.input_channels, point.side, point.side), settings)
        return models[method], x

    points = [Point("forward", batch, settings.side) for batch in sorted({1, settings.batch})]
    if settings.training:
        points.append(Point("training", settings.batch, settings.side))
    measured(results, path, points, build, lambda *_: None, settings, console)
    table = network_table(results)
    console.print(as_rich(table))
    for line in skipped_lines(results):
        console.print(line, style="dim")
    write_atomically(settings.out / "nets.md", as_markdown(results, [table]))
    console.print(f"Written: {path}, {settings.out / 'nets.md'}", soft_wrap=True)
    return results


def selected_variants(settings: NetSettings) -> dict[str, tuple[str | None, str]]:
    """Block and placement of every variant by its name, the plain network first."""
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


def counts(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Parameters, and the multiply-adds of one image by torch's counter, which sees matrix products only."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(x)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "multiply_adds": counter.get_total_flops() // 2,
    }


def network_table(results: Results) -> Table:
    """A row for each variant, what it costs and that divided by the plain network's."""
    s = results.settings
    batches = f"{s['batch']} images"
    headings = [
        "network",
        "parameters",
        "multiply-adds",
        "latency, 1 image",
        "images/s",
        f"memory, {batches}",
    ]
    headings += [f"training step, {batches}"] if s["training"] else []
    rows = []
    for method, known in results.methods.items():
        base = results.methods[results.reference]
        one = results.at(method, Point("forward", 1, s["side"]))
        many = results.at(method, Point("forward", s["batch"], s["side"]))
        row = [
            known["label"],
            _with_ratio(f"{known['parameters'] / 1e6:.2f} M", known["parameters"] / base["parameters"]),
            _with_ratio(
                f"{known['multiply_adds'] / 1e9:.2f} G", known["multiply_adds"] / base["multiply_adds"]
            ),
            _time(results, one),
            _throughput(results, many),
            _memory(results, many),
        ]
        if s["training"]:
            row.append(_time(results, results.at(method, Point("training", s["batch"], s["side"]))))
        rows.append(row)
    images = f"{s['side']}×{s['side']}, {s['dtype']}, median of {counted(s['runs'], 'run')}"
    return Table(
        f"{results.label(results.reference)} at {images}; in brackets, divided by the plain network",
        headings,
        rows,
    )


def _with_ratio(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text} ({ratio:.2f})"


def _time(results: Results, measurement: Measurement | None) -> str:
    if measurement is None or measurement.median is None:
        return NOT_MEASURED
    return _with_ratio(duration(measurement.median), results.ratio(measurement))


def _throughput(results: Results, measurement: Measurement | None) -> str:
    if measurement is None or measurement.median is None:
        return NOT_MEASURED
    ratio = results.ratio(measurement)
    return _with_ratio(
        f"{measurement.point.batch / measurement.median:.1f}", None if ratio is None else 1 / ratio
    )


def _memory(results: Results, measurement: Measurement | None) -> str:
    if measurement is None or measurement.peak_bytes is None:
        return NOT_MEASURED
    return _with_ratio(size_of(measurement.peak_bytes), results.memory_ratio(measurement))
