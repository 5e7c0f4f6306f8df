"""FSDP2: two processes with sharded parameters compute what one does with all of them."""

import copy
from pathlib import Path

import torch
from cases import CASES, CHANNELS, DEFAULTS, Case, assert_close, image
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# Besides the defaults, which choose the direct form here, one with the Gram form and one with a batch norm.
SHARDED = [*DEFAULTS, *(case for case in CASES if case.options.get("form") in ("gram", "quadratic"))]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    on_ranks(2, train_all, tmp_path)  # warnings are errors there: FSDP warns of views, which lose its hooks


def train_all(rank: int) -> None:
    for case in SHARDED:
        for layer_by_layer in (False, True):
            train(case, layer_by_layer)


def train(case: Case, layer_by_layer: bool) -> None:
    """Both processes see the same maps, so that batch norms do, too."""
    block = case.build().train()
    alone = nn.Sequential(copy.deepcopy(block), nn.ReLU(inplace=True))
    if layer_by_layer:
        for layer in reversed([*block.modules()][1:]):  # inner layers first
            if [*layer.parameters(recurse=False)]:
                fully_shard(layer)
    fully_shard(block)
    sharded = fully_shard(nn.Sequential(block, nn.ReLU(inplace=True)))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (sharded, alone)]
    for seed in range(2):
        for net, optimizer in zip((sharded, alone), optimizers, strict=True):
            net(image(case, 2, CHANNELS, 8, 8, seed=seed)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, expected in zip(sharded.parameters(), alone.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert_close(ours.full_tensor(), expected, 1e-5)
