"""The random numbers of a process, and a pass through a model that leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of the CPU, and of the GPU if it is one."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Draw the numbers next that would have been drawn then."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards random numbers, batch statistics and gradients are as if nothing had been computed."""
    random, buffers = random_state(device), [buffer.clone() for buffer in model.buffers()]
    yield
    set_random_state(random, device)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    model.zero_grad()
