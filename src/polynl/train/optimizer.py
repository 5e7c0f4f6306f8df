"""Optimizers of torch, with weight decay on what is to decay."""

from __future__ import annotations

import torch
from torch import nn

from polynl.train.recipe import OptimizerConfig


def build_optimizer(model: nn.Module, part: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model's trainable parameters; its learning rate is set at every step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [p for p in trainable if p.ndim < 2 and not part.decay_norm_and_bias]
    matrices = [p for p in trainable if p.ndim >= 2 or part.decay_norm_and_bias]
    groups = [
        {"params": matrices, "weight_decay": part.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if part.name == "adamw":
        return torch.optim.AdamW(groups, lr=part.lr, betas=part.betas)
    return torch.optim.SGD(groups, lr=part.lr, momentum=part.momentum, nesterov=part.nesterov)
