"""Batch norms as training on few images a device needs them."""

from __future__ import annotations

from torch import nn
from torchvision.ops import FrozenBatchNorm2d


def freeze_norms(model: nn.Module) -> None:
    """Replace every BatchNorm2d by one whose statistics and parameters stay as they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, _frozen(child))


def _frozen(norm: nn.BatchNorm2d) -> FrozenBatchNorm2d:
    frozen = FrozenBatchNorm2d(norm.num_features, eps=norm.eps).to(norm.weight)
    frozen.load_state_dict({name: norm.state_dict()[name] for name in frozen.state_dict()})
    return frozen
