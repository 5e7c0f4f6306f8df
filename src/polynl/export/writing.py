"""Write a program, load it in its runtime, compare it, and only then give it its name."""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from polynl.errors import check_choices
from polynl.export.axes import Dynamic, Open, dynamic_shapes, open_axes, three_inputs, traceable, with_limits
from polynl.export.checks import Comparison, Export, ExportError, compared, median_seconds
from polynl.export.runtimes import RUNTIMES, Run, Runtime, Save, quiet

TOLERANCE = 1e-4


def export(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: Tensor,
    *,
    to: str,
    dynamic: Dynamic = (),
    tolerance: float = TOLERANCE,
) -> Export:
    """Write the model for the runtime `to`: "onnx", "openvino", "executorch" or "torch".

    The model takes a tensor (b, c, *spatial) like the `example`, and returns a tensor or any collection of
    them. It may be on any device and in any mode: a copy on the CPU in eval mode is exported.

    `dynamic` are the axes whose size stays open: of "batch", "depth", "height" and "width". As a mapping, it
    also has the largest size of each, as in `{"batch": 16}`; ExecuTorch, which plans its memory, by default
    takes twice the example's, and 8 images.

    The file is loaded in the runtime and compared with the model at three sizes, or with three inputs if no
    size is open. If an output differs by more than `tolerance`, relative to the largest value, or cannot be
    computed, an :class:`ExportError` says so, and there is no file. An existing file is replaced by a correct
    one, or kept.
    """
    (to,) = check_choices([to], list(RUNTIMES), "runtime")
    runtime = RUNTIMES[to]
    runtime.check_installed()
    path = _destination(Path(file), runtime)
    _check_types(model, example)
    axes = open_axes(dynamic, example)
    # Networks are trained in channels_last; XNNPACK folds batch norms into weights in the usual layout alone.
    model = copy.deepcopy(model).cpu().to(memory_format=torch.contiguous_format).eval()
    example = example.detach().cpu().contiguous()
    if runtime.plans_memory:
        axes = with_limits(axes, example)
    reference: Run = torch.no_grad()(lambda x: tree_leaves(model(x)))
    inputs = three_inputs(example, axes)
    with torch.no_grad(), quiet():
        _import_packages(runtime)
        _check_model(model, inputs)
        program = exported_program(model, traceable(example, axes), axes)
        save = _converted(program, runtime)
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as folder:
            staged = Path(folder, path.name)
            _save(save, staged, path)
            run = _loaded(staged, runtime)
            done = _verified(run, reference, inputs, runtime, tolerance)
            seconds, torch_seconds = median_seconds([partial(run, example), partial(reference, example)])
            del run  # which may hold the file open
            _put_in_place(staged)
    return Export(path, runtime.label, done, seconds, torch_seconds)


def to_onnx(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: Tensor,
    *,
    dynamic: Dynamic = (),
    tolerance: float = TOLERANCE,
) -> Export:
    """Write an .onnx file; see :func:`export`. Its input is called "input", its output "output"."""
    return export(model, file, example, to="onnx", dynamic=dynamic, tolerance=tolerance)


def to_openvino(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: Tensor,
    *,
    dynamic: Dynamic = (),
    tolerance: float = TOLERANCE,
) -> Export:
    """Write an .xml file and a .bin file next to it; see :func:`export`."""
    return export(model, file, example, to="openvino", dynamic=dynamic, tolerance=tolerance)


def to_executorch(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: Tensor,
    *,
    dynamic: Dynamic = (),
    tolerance: float = TOLERANCE,
) -> Export:
    """Write a .pte file, with XNNPACK's kernels; see :func:`export`."""
    return export(model, file, example, to="executorch", dynamic=dynamic, tolerance=tolerance)


def to_torch(
    model: nn.Module,
    file: str | os.PathLike[str],
    example: Tensor,
    *,
    dynamic: Dynamic = (),
    tolerance: float = TOLERANCE,
) -> Export:
    """Write a .pt2 file, which torch.export.load reads; see :func:`export`."""
    return export(model, file, example, to="torch", dynamic=dynamic, tolerance=tolerance)


def exported_program(model: nn.Module, example: Tensor, axes: Open) -> ExportedProgram:
    """The model as one graph of operations, from which all runtimes start."""
    try:
        return torch.export.export(model, (example,), dynamic_shapes=(dynamic_shapes(axes),), strict=False)
    except Exception as error:
        raise ExportError(
            f"torch.export cannot follow {type(model).__name__}: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line that says something, with what follows its colon; converters explain at length."""
    said = ""
    for line in str(error).splitlines():
        said = f"{said} {line.strip()}".strip()
        if said and not said.endswith(":"):
            break
    return said or type(error).__name__


def _destination(file: Path, runtime: Runtime) -> Path:
    """The file, in a folder that exists now; an error if it has another suffix or is a folder."""
    if file.suffix != runtime.suffix:
        raise ValueError(f"{file} must end in {runtime.suffix}, since it is for {runtime.label}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder; expected a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _check_types(model: nn.Module, example: Tensor) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module")
    if not isinstance(example, Tensor):
        raise TypeError(f"example is a {type(example).__name__}; expected a tensor (b, c, *spatial)")
    if example.numel() == 0:
        raise ValueError(f"example has shape {tuple(example.shape)}, which is empty")


def _check_model(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Run the model itself first: of a size that it does not take, converters say less than it does."""
    name = type(model).__name__
    for x in inputs:
        try:
            outputs = tree_leaves(model(x))
        except Exception as error:
            raise ExportError(f"{name} fails on an input {tuple(x.shape)}: {first_line(error)}") from error
        others = {type(y).__name__ for y in outputs if not isinstance(y, Tensor)}
        if others:
            raise ExportError(f"{name} returns {', '.join(sorted(others))}; expected tensors only")


def _import_packages(runtime: Runtime) -> None:
    """Before there is a temporary folder: an interrupted import ends the process, which would leave it."""
    for package in runtime.packages:
        try:
            importlib.import_module(package)
        except Exception as error:
            raise ExportError(f"{package} cannot be imported: {first_line(error)}") from error


def _put_in_place(staged: Path) -> None:
    """Move a file and those that belong to it one folder up, the file itself last.

    Whoever finds it finds what belongs to it: an old one is not left with the weights of the new.
    """
    folder = staged.parent.parent
    *others, file = sorted(staged.parent.iterdir(), key=lambda part: part.name == staged.name)
    if others:
        (folder / file.name).unlink(missing_ok=True)
    for part in (*others, file):
        os.replace(part, folder / part.name)


def _converted(program: ExportedProgram, runtime: Runtime) -> Save:
    try:
        return runtime.convert(program)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first one names the operation
            cause = cause.__cause__
        raise ExportError(f"{runtime.label} cannot run this model: {first_line(cause)}") from error


def _save(save: Save, staged: Path, path: Path) -> None:
    try:
        save(staged)
    except Exception as error:  # a full disk is no OSError in every runtime
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise ExportError(f"{path} cannot be written: {reason}") from error


def _loaded(file: Path, runtime: Runtime) -> Run:
    """The program in its runtime, read from the file that was written."""
    try:
        return runtime.load(file)
    except Exception as error:
        raise ExportError(f"{runtime.label} cannot run this model: {first_line(error)}") from error


def _verified(
    run: Run, reference: Run, inputs: Sequence[Tensor], runtime: Runtime, tolerance: float
) -> tuple[Comparison, ...]:
    """The comparisons; an ExportError if one is beyond the tolerance."""
    done = []
    for x in inputs:
        try:
            comparison = compared(run, reference, x)
        except ExportError:
            raise
        except Exception as error:
            shape = tuple(x.shape)
            raise ExportError(f"{runtime.label} fails on an input {shape}: {first_line(error)}") from error
        if not comparison.difference <= tolerance:
            raise ExportError(
                f"{runtime.label} differs from PyTorch by {comparison.difference:.1e} on an input "
                f"{comparison.shape}, more than the tolerance {tolerance:g}; nothing was written"
            )
        done.append(comparison)
    return tuple(done)
