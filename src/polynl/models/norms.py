"""Batch norms of a network: frozen, or with the statistics of all processes."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

Model = TypeVar("Model", bound=nn.Module)


def freeze_norms(model: nn.Module, *, eps: float | None = None, only_untrained: bool = False) -> None:
    """Replace every BatchNorm2d by a frozen one with the same values (default `eps`: its own).

    With `only_untrained`, norms whose weights are trained stay.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d) and not (only_untrained and _is_trained(child)):
                setattr(parent, name, _frozen(child, child.eps if eps is None else eps))


def synchronised(model: Model) -> Model:
    """The model with statistics of all processes in its batch norms."""
    if any(_of_timm(module) for module in model.modules()):
        from timm.layers.norm_act import convert_sync_batchnorm

        return convert_sync_batchnorm(model)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def _is_trained(norm: nn.BatchNorm2d) -> bool:
    # Without weights there is nothing that says it should not collect statistics.
    return not norm.affine or norm.weight.requires_grad


def _frozen(norm: nn.BatchNorm2d, eps: float) -> nn.Module:
    if _of_timm(norm):
        from timm.layers.norm_act import freeze_batch_norm_2d

        frozen: Any = freeze_batch_norm_2d(norm)
        frozen.eps = eps
        return frozen
    if type(norm).forward is not nn.BatchNorm2d.forward or not (norm.affine and norm.track_running_stats):
        raise ValueError(
            f"norm: {type(norm).__name__} cannot be frozen: it is not a BatchNorm2d of PyTorch with weights "
            "and running statistics"
        )
    frozen = FrozenBatchNorm2d(norm.num_features, eps=eps).to(norm.weight)
    frozen.load_state_dict({key: norm.state_dict()[key] for key in frozen.state_dict()})
    return frozen


def _of_timm(module: nn.Module) -> bool:
    """Whether it is timm's norm with an activation, which a plain norm would lose."""
    layers = sys.modules.get("timm.layers")  # loaded if the model is timm's
    return layers is not None and isinstance(module, layers.BatchNormAct2d)
