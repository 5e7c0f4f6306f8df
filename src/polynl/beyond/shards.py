"""Maps that are shared out over processes: each block sums its summary over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from polynl.beyond.parts import blocks_of
from polynl.functional.summary import Summary


def shard(model: nn.Module, group: Any = None) -> nn.Module:
    """Let all blocks of a model attend to the maps of all processes of a group of torch.distributed.

    Every process calls it, and then runs the model on its part of the map: any part, as long as batches are
    equal, which the first pass checks. A forward pass has one all-reduce of the summary per block, a backward
    pass one of its gradient.
    Outputs and gradients are those of the whole map; gradients of parameters are those of the process's own
    part, so sum them over processes (DDP takes their mean).

    What is around the blocks sees the process's own part alone: a convolution at its border needs the
    neighbours' positions.
    """
    blocks = blocks_of(model)
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialised: start the processes with torchrun, and call "
            "torch.distributed.init_process_group"
        )
    _check_alike({name: _described(block) for name, block in blocks.items()}, group)
    for name, block in blocks.items():
        if block.exchange is not None and not isinstance(block.exchange, _AllReduce):
            raise ValueError(f"{name} is already in a stream: close that first")
        block.exchange = _AllReduce(name, group)
    return model


def unshard(model: nn.Module) -> nn.Module:
    """Let all blocks attend to the maps of their own process again."""
    for block in blocks_of(model).values():
        if isinstance(block.exchange, _AllReduce):
            block.exchange = None
    return model


@dataclass
class _AllReduce:
    """Sums a block's summary over the processes of a group."""

    name: str
    group: Any
    checked: bool = False

    def __call__(self, summary: Summary) -> Summary:
        # Only in the first pass: it costs as much as the sum itself.
        check, self.checked = not self.checked, True
        try:
            return summary.all_reduce(self.group, check=check)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def __deepcopy__(self, memo: Any) -> _AllReduce:
        """Groups cannot be copied, and a copy of the model is of the same group."""
        return _AllReduce(self.name, self.group)


def _described(block: nn.Module) -> str:
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
    dtype = next((p.dtype for p in block.parameters()), None)
    return f"{type(block).__name__}({block.extra_repr()}) {dtype} {shapes}"


def _check_alike(blocks: dict[str, str], group: Any) -> None:
    """Raise on every process the same ValueError, if one has other blocks than the first."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, blocks, group=group)
    for rank, theirs in enumerate(everywhere):
        for name in everywhere[0] | theirs:
            first, other = everywhere[0].get(name, "none"), theirs.get(name, "none")
            if first != other:
                raise ValueError(
                    f"the processes have different blocks at {name}: {first} on rank 0, {other} on {rank}"
                )
