"""`polynl bench layers`: the paper's Figure 2 on this machine."""

from __future__ import annotations

import functools
import math

import torch
from rich.console import Console
from torch import Tensor, nn

from polynl.bench.cases import BY_NAME, PEERS, REFERENCE, Case, randomised
from polynl.bench.plots import save_layer_figures
from polynl.bench.runner import measure_points, random_maps, start_or_resume, write_tables
from polynl.bench.settings import LayerSettings
from polynl.results.benchmark import STEPS, Point, Results
from polynl.results.formats import byte_size
from polynl.results.tables import layer_tables


def run_layers(settings: LayerSettings, console: Console) -> Results:
    """Measure every layer at every size, then show and save tables and figures."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    cases = selected_cases(settings, console)
    path = settings.out / "layers.json"
    methods = {case.name: {"label": case.label} for case in cases}
    results = start_or_resume(path, settings, kind="layers", methods=methods, reference=REFERENCE)
    itemsize = getattr(torch, settings.dtype).itemsize
    inputs = functools.lru_cache(maxsize=1)(lambda shape: random_maps(shape, settings))

    def build(method: str, point: Point) -> tuple[nn.Module, Tensor]:
        channels = point.size("channels")
        x = inputs((point.batch, channels, *point.spatial))
        return randomised(BY_NAME[method].build(channels), settings.seed), x

    def refusal(method: str, point: Point) -> str | None:
        needed = BY_NAME[method].predicted_peak(point, itemsize)
        if needed is None or needed <= settings.memory_limit_gib * 2**30:
            return None
        return f"needs {byte_size(needed)}, limit {settings.memory_limit_gib:g} GiB"

    measure_points(results, path, layer_points(settings), build, refusal, settings, console)
    figures = [] if settings.shape else save_layer_figures(results, settings.out)
    write_tables(results, path, layer_tables(results), console, figures)
    return results


def selected_cases(settings: LayerSettings, console: Console) -> list[Case]:
    """The reference, then the selected layers; peers that are not installed are skipped with a warning."""
    names = [REFERENCE, *settings.blocks, *(peer.name for peer in PEERS if settings.peers)]
    cases = [BY_NAME[name] for name in dict.fromkeys(names)]
    for case in cases:
        if not case.available():
            console.print(
                f"{case.label} is skipped: the package {case.package} is not installed.", style="yellow"
            )
    return [case for case in cases if case.available()]


def layer_points(settings: LayerSettings) -> list[Point]:
    """The points of both sweeps or of the given shapes, each size once, smaller ones first."""
    if settings.shape:
        shapes = sorted(dict.fromkeys(settings.shape), key=math.prod)
        return [Point.of(step, shape) for shape in shapes for step in STEPS]
    sizes = {(settings.at_side, channels) for channels in settings.channels}
    sizes |= {(side, settings.at_channels) for side in settings.sides}
    ordered = sorted(sizes, key=lambda size: size[0] ** 2 * size[1])
    return [Point(step, settings.batch, side, channels) for side, channels in ordered for step in STEPS]
