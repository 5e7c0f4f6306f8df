"""The runtimes: how each converts an exported program, and runs what it reads from a file."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from polynl.extras import check_package

Run = Callable[[Tensor], list[Tensor]]
"""A program that was read from a file: the outputs for an input."""
Save = Callable[[Path], Any]
"""Writes a converted program to a file."""


@dataclass(frozen=True)
class Runtime:
    """A runtime that exported programs are written for."""

    label: str
    suffix: str
    packages: tuple[str, ...]
    """What it imports, beyond torch."""
    convert: Callable[[ExportedProgram], Save]
    """Gives what writes the program to a file with this suffix; further files have the same stem."""
    load: Callable[[Path], Run]
    plans_memory: bool = False
    """Whether it needs the largest size of every open axis."""

    def check_installed(self) -> None:
        """Raise a ModuleNotFoundError that says what to install, if a package is missing."""
        for package in self.packages:
            check_package(package)


def convert_torch(program: ExportedProgram) -> Save:
    """torch.export's own format. On a full disk, torch's own writing to files would abort the process."""
    content = io.BytesIO()
    torch.export.save(program, content)
    return lambda file: file.write_bytes(content.getbuffer())


def load_torch(file: Path) -> Run:
    """In PyTorch, without the model's code."""
    module = torch.export.load(file).module()
    return lambda x: tree_leaves(module(x))


def convert_onnx(program: ExportedProgram) -> Save:
    """One file, with the weights."""
    outputs = len(program.graph_signature.user_outputs)
    names = ["output"] if outputs == 1 else [f"output_{number}" for number in range(outputs)]
    converted: Any = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=["input"], output_names=names
    )
    _name_axes(converted.model)
    return lambda file: converted.save(file, external_data=False)


def _name_axes(model: Any) -> None:
    """Call the open axes of the input batch, height and width, in the outputs too."""
    import onnx_ir

    shape = model.graph.inputs[0].shape
    spatial = ("batch", "channels", "depth", "height", "width")
    names = {0: "batch"} | {axis: spatial[axis - len(shape)] for axis in range(2, len(shape))}
    named = {
        str(size): names.get(axis, f"axis_{axis}")
        for axis, size in enumerate(shape)
        if not isinstance(size, int)
    }
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            sizes = [
                size if isinstance(size, int) else named.get(str(size), str(size)) for size in value.shape
            ]
            value.shape = onnx_ir.Shape(sizes)


def load_onnx(file: Path) -> Run:
    """In ONNX Runtime, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda x: [torch.from_numpy(y) for y in session.run(None, {"input": x.numpy()})]


def convert_openvino(program: ExportedProgram) -> Save:
    """An .xml file and a .bin file with the weights, not rounded to fp16."""
    import openvino

    converted = openvino.convert_model(program)
    return lambda file: openvino.save_model(converted, file, compress_to_fp16=False)


def load_openvino(file: Path) -> Run:
    """On the CPU in fp32, with as many threads as torch. By default, newer CPUs would compute in bfloat16."""
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(file, "CPU", options)
    return lambda x: [torch.from_numpy(y.copy()) for y in compiled(x.numpy()).values()]


def convert_executorch(program: ExportedProgram) -> Save:
    """With XNNPACK's kernels for CPUs, as far as it has them."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    content = lowered.to_executorch().buffer
    return lambda file: file.write_bytes(content)


def load_executorch(file: Path) -> Run:
    """In ExecuTorch's own runtime."""
    from executorch.runtime import Runtime as ExecuTorch

    program = ExecuTorch.get().load_program(file)
    method = program.load_method("forward")
    # The outputs are in memory that the next call overwrites.
    return lambda x: [y.clone() for y in method.execute([x.contiguous()])]


RUNTIMES: dict[str, Runtime] = {
    "onnx": Runtime(
        "ONNX Runtime", ".onnx", ("onnx", "onnx_ir", "onnxscript", "onnxruntime"), convert_onnx, load_onnx
    ),
    "openvino": Runtime("OpenVINO", ".xml", ("openvino",), convert_openvino, load_openvino),
    "executorch": Runtime(
        "ExecuTorch", ".pte", ("executorch",), convert_executorch, load_executorch, plans_memory=True
    ),
    "torch": Runtime("torch.export", ".pt2", (), convert_torch, load_torch),
}
"""The runtimes by the names that `to` takes."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what converters warn about and log: what they write is compared with PyTorch in any case."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
