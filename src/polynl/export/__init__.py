"""Export models with blocks to other runtimes: what is written is loaded there and compared with PyTorch.

>>> import torch, polynl
>>> file = getfixture("tmp_path") / "block.pt2"
>>> polynl.export.to_torch(polynl.PolyNL(4), file, torch.randn(2, 4, 6, 5)).difference < 1e-5
True
"""

from polynl.export.axes import Dynamic
from polynl.export.checks import Comparison, Export, ExportError
from polynl.export.runtimes import RUNTIMES, Runtime
from polynl.export.writing import export, to_executorch, to_onnx, to_openvino, to_torch

__all__ = [
    "RUNTIMES",
    "Comparison",
    "Dynamic",
    "Export",
    "ExportError",
    "Runtime",
    "export",
    "to_executorch",
    "to_onnx",
    "to_openvino",
    "to_torch",
]
