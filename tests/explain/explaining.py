"""Runs of `polynl explain`, and networks whose blocks add something."""

from pathlib import Path
from typing import Any

import torch
from command_line import run
from torch import nn

KINDS = ("grad_cam", "features", "influence")


def stir(model: nn.Module) -> nn.Module:
    """Values that no initialisation has, so that blocks add something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "polynl_" in name:
                value.copy_(torch.randn(value.shape, generator=generator) / max(value.shape or (1,)) ** 0.5)
    return model


def explain(capsys: Any, *words: object) -> tuple[int, str, str]:
    code, out, err = run(capsys, "explain", *words)
    return code, " ".join(out.split()), err


def drawn(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
