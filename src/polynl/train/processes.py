"""The processes of a run: one by itself, or those that torchrun started."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polynl.errors import RunStoppedError, SettingsError

# torchrun gives up on a process that hangs; until then a slow first epoch is no reason to stop.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """This process among `count`; all of them call the same methods at the same time."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """Whether torchrun started this process again after one had died."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    @property
    def launch(self) -> str:
        """What the processes of one torchrun have in common, also after a restart; empty without torchrun."""
        name = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return f"{socket.gethostname()} {os.getppid()}" if name == "none" else name

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is wrong in one process ends all of them when they leave this, not only that one."""
        problem: SettingsError | RunStoppedError | None = None
        try:
            yield
        except (SettingsError, RunStoppedError) as error:
            problem = error
        for found in self.gathered(problem):
            if found is not None:
                self.end(found)

    def end(self, error: SettingsError | RunStoppedError) -> NoReturn:
        """End all processes, which call this together; the first one says why."""
        if self.first:
            raise error
        # With another code torchrun would kill the first one, which may not have said it yet.
        raise SystemExit(0)

    def check(self, model: nn.Module) -> None:
        """Raise a SettingsError where these processes cannot train the model."""
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if synced and self.count > 1 and self.device.type == "cpu":
            raise SettingsError("model.norm: sync needs GPUs; on the CPU there is no such norm.")

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model as training calls it: with several processes, gradients are averaged over them."""
        if self.count == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the batch statistics of the first one, which are those that it saves."""
        if self.count > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Which flags are raised in any process."""
        if self.count == 1:
            return flags
        raised = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in raised.tolist())

    def sums(self, *values: float) -> tuple[float, ...]:
        """The values added up over all processes."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def gathered(self, value: Any) -> list[Any]:
        """What every process has, in the order of ranks."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """What the first process has."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the processes that torchrun started, or be the only one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: cuda was asked for, and PyTorch sees no CUDA device here.")
    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Processes(0, 1, torch.device("cuda", 0) if gpu else torch.device("cpu"))
        return
    chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()
