"""`polynl export`: networks for other runtimes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from polynl.commands.options import FILE, Keys, OptionalModule, OptionalRecipe, option_names


@dataclass(frozen=True)
class Export:
    """Export a trained network to ONNX, OpenVINO, ExecuTorch or torch.export.

    The file is checked in its runtime at three sizes; a wrong one is not kept:
      polynl export runs/scenes/poly_nl-res4 --to onnx --dynamic batch
      polynl export resnet50.pth --recipe imagenet --model.block none --to torch
    """

    checkpoint: Annotated[Positional[Path], arg(metavar="RUN|FILE")]
    """Folder of a run, or a checkpoint or weights in it; must come first."""
    to: Literal["onnx", "openvino", "executorch", "torch"]
    """Runtime to export to."""
    dynamic: Annotated[tuple[str, ...], arg(metavar="AXIS …")] = ()
    """Axes whose size stays open: batch, height, width; height=512 for at most 512 (default: all sizes are
    fixed)."""
    out: Annotated[Path | None, FILE] = None
    """File to write (default: model.onnx, model.xml, model.pte or model.pt2 in the run's folder)."""
    module: OptionalModule = None
    """Export only this module of the network, which takes images, such as the backbone of a detector."""
    size: Annotated[int | None, arg(metavar="SIDE")] = None
    """Side of the square images (default: the recipe's; for detectors 256)."""
    tolerance: float = 1e-4
    """Largest difference from PyTorch that is accepted, as a fraction of the largest output."""
    recipe: OptionalRecipe = None
    """Recipe it was trained with (default: recipe.yaml next to it)."""
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.export.run.run_export`."""
        from polynl.export.run import ExportSettings, run_export

        settings = ExportSettings(self.to, self.dynamic, self.out, self.module, self.size, self.tolerance)
        run_export(
            self.checkpoint,
            settings,
            console,
            recipe=self.recipe,
            keys=self.keys,
            options=option_names(self),
        )
