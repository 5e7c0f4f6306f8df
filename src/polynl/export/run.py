"""`polynl export`: the network of a run for another runtime, with what is needed to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn

from polynl.errors import RunStoppedError, SettingsError, near_matches, sentence
from polynl.export.checks import Export, ExportError
from polynl.export.runtimes import RUNTIMES
from polynl.export.writing import TOLERANCE, export
from polynl.files import check_destination, write_atomically
from polynl.tasks.base import DetectionTask
from polynl.train.run_folder import TrainedModel, find_trained

# How images become inputs of a classifier, as far as a recipe's data set has these keys.
PREPROCESSING = ("resize", "size", "interpolation", "mean", "std")
DETECTOR_SIDE = 256


@dataclass(frozen=True)
class ExportSettings:
    """What to export, besides the checkpoint."""

    to: str
    dynamic: Sequence[str] = ()
    """Names of axes, or name=largest."""
    out: Path | None = None
    module: str | None = None
    size: int | None = None
    tolerance: float = TOLERANCE


def run_export(
    checkpoint: Path,
    settings: ExportSettings,
    console: Console,
    *,
    recipe: str | None = None,
    keys: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Export:
    """Export the network of a checkpoint, and print how it compares; see :func:`polynl.export.export`.

    Next to the file, a JSON file has the names of the classes, the preprocessing and the comparison.
    """
    runtime = RUNTIMES[settings.to]
    runtime.check_installed()  # before the model is loaded
    dynamic = parsed_axes(settings.dynamic)
    if not checkpoint.exists():
        raise SettingsError(f"no such run or checkpoint: {checkpoint}.")
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    file = folder / f"model{runtime.suffix}" if settings.out is None else settings.out
    check_destination(file, "file", "--out")
    trained = find_trained(checkpoint, recipe, keys, options)
    network, model = network_and_module(trained, settings.module)
    try:
        example = example_for(trained, settings.size)
        done = export(model, file, example, to=settings.to, dynamic=dynamic, tolerance=settings.tolerance)
    except ExportError as error:
        raise RunStoppedError(f"{error}.") from error
    except ValueError as error:
        raise SettingsError(sentence(error)) from error
    description = file.with_name(f"{file.name}.json")
    content = described(trained, network, done, example, dynamic, settings.module)
    write_atomically(description, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for line in report_lines(done, description, example):
        console.print(escape(line), highlight=False, soft_wrap=True)
    return done


def parsed_axes(words: Sequence[str]) -> dict[str, int | None]:
    """Of `height` and `height=512` the name and the largest size."""
    axes: dict[str, int | None] = {}
    for word in words:
        name, equals, most = word.partition("=")
        if equals and not (most.isdecimal() and int(most) > 0):
            raise SettingsError(f"--dynamic {word}: expected {name}=SIZE, with the largest size.")
        axes[name] = int(most) if equals else None
    return axes


def network_and_module(trained: TrainedModel, name: str | None) -> tuple[nn.Module, nn.Module]:
    """The network, and of it what to export; a detector as a whole is not a graph of fixed operations."""
    if name is None and isinstance(trained.task, DetectionTask):
        raise SettingsError(
            "a detector cannot be exported as a whole, since the number of its boxes depends on the image: "
            "export its maps with --module backbone."
        )
    model = trained.load(torch.device("cpu"))
    modules = dict(model.named_modules())
    if name is not None and name not in modules:
        raise SettingsError(f"--module: the network has no module {name!r}.{near_matches(name, modules)}")
    return model, model if name is None else modules[name]


def example_for(trained: TrainedModel, side: int | None) -> Tensor:
    """Random pixels as the network sees an image, or of another size."""
    generator = torch.Generator().manual_seed(0)
    if side is not None or isinstance(trained.task, DetectionTask):
        side = DETECTOR_SIDE if side is None else side
        if side < 1:
            raise SettingsError(f"--size {side}: expected a number above 0.")
        return torch.randn(1, 3, side, side, generator=generator)
    pixels = torch.randint(256, (3, 256, 256), dtype=torch.uint8, generator=generator)
    return trained.task.inputs(trained.task.view()(pixels))


def preprocessing(trained: TrainedModel, network: Any) -> dict[str, Any]:
    """How an image becomes the input. A detector does that itself, outside of the modules it consists of."""
    if isinstance(trained.task, DetectionTask):
        transform = network.transform
        return {
            "min_size": transform.min_size[-1],
            "max_size": transform.max_size,
            "mean": list(transform.image_mean),
            "std": list(transform.image_std),
        }
    data = trained.recipe.data.model_dump(mode="json", include=set(PREPROCESSING))
    return {key: data[key] for key in PREPROCESSING if key in data}


def described(
    trained: TrainedModel,
    network: nn.Module,
    done: Export,
    example: Tensor,
    dynamic: Mapping[str, int | None],
    module: str | None,
) -> dict[str, Any]:
    """What a program needs to use the file."""
    return {
        "runtime": done.runtime,
        "module": module,
        "input": list(example.shape),
        "dynamic": dict(dynamic),
        "preprocessing": preprocessing(trained, network),
        "labels": trained.task.output_labels(),
        "comparisons": [{"shape": list(c.shape), "difference": c.difference} for c in done.comparisons],
    }


def report_lines(done: Export, description: Path, example: Tensor) -> list[str]:
    """The largest difference and the latencies, in words."""
    shapes = dict.fromkeys(times(comparison.shape) for comparison in done.comparisons)
    where = f"at {', '.join(shapes)}" if len(shapes) > 1 else f"with three inputs {next(iter(shapes))}"
    threads = torch.get_num_threads()
    return [
        f"{done.runtime} differs from PyTorch by at most {done.difference:.1e} of the largest output, "
        f"{where}.",
        f"Latency at {times(example.shape)}: {1000 * done.seconds:.3g} ms in {done.runtime}, "
        f"{1000 * done.torch_seconds:.3g} ms in PyTorch, {threads} thread{'s' if threads > 1 else ''}.",
        f"Wrote {done.file}; {description.name} next to it has the preprocessing and the labels.",
    ]


def times(shape: Sequence[int]) -> str:
    """As in 1×3×224×224."""
    return "×".join(map(str, shape))
