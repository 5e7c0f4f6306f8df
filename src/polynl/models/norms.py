"""Batch norms as training on few images a device needs them."""

from __future__ import annotations

from torch import nn
from torchvision.ops import FrozenBatchNorm2d


def freeze_norms(model: nn.Module, *, eps: float | None = None) -> None:
    """Replace every BatchNorm2d by one whose values stay as they are; `eps`, if given, instead of its own."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, _frozen(child, child.eps if eps is None else eps))


def _frozen(norm: nn.BatchNorm2d, eps: float) -> FrozenBatchNorm2d:
    frozen = FrozenBatchNorm2d(norm.num_features, eps=eps).to(norm.weight)
    frozen.load_state_dict({name: norm.state_dict()[name] for name in frozen.state_dict()})
    return frozen
