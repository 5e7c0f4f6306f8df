"""Sums over processes that gradients pass through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumOverRanks(torch.autograd.Function):
    """Σ over ranks, on every rank; what a rank adds reaches the outputs of all, so gradients add up too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None


def sum_over_ranks(tensors: dict[str, Tensor], group: Any = None) -> dict[str, Tensor]:
    """The sums of tensors that have the same shapes on all ranks, by one all-reduce."""
    dtype = next(iter(tensors.values())).dtype
    flat = torch.cat([tensor.to(dtype).flatten() for tensor in tensors.values()])
    parts = _SumOverRanks.apply(flat, group).split([tensor.numel() for tensor in tensors.values()])
    return {
        name: part.view(tensor.shape).to(tensor.dtype)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def gathered(tensors: dict[str, Tensor], group: Any = None) -> list[dict[str, Tensor]]:
    """The tensors of every rank, in the order of the ranks; they have the same shapes on all."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    # Every rank adds its own to zeros: an all-gather whose gradient is that of the sum.
    placed = {
        name: torch.stack([tensor if place == rank else torch.zeros_like(tensor) for place in range(ranks)])
        for name, tensor in tensors.items()
    }
    totals = sum_over_ranks(placed, group)
    return [{name: total[place] for name, total in totals.items()} for place in range(ranks)]


def largest_over_ranks(number: int, group: Any = None, device: torch.device | str = "cpu") -> int:
    """The largest of the ranks' numbers."""
    shared = torch.tensor(number, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return int(shared)


def check_same(what: str, here: str, group: Any = None) -> None:
    """Raise the same ValueError on all ranks, unless they say the same; a backend would end the process."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, here, group=group)
    for rank, there in enumerate(everywhere):
        if there != everywhere[0]:
            raise ValueError(
                f"the processes have different {what}: {everywhere[0]} on rank 0, {there} on rank {rank}"
            )
