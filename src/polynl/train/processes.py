"""The processes of a run, the signals that end it, its devices and random numbers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polynl.errors import RunStoppedError, SettingsError
from polynl.train.config import Recipe

# torchrun gives up on a process that hangs; until then a slow first epoch is no reason to stop.
TIMEOUT = timedelta(minutes=30)
Result = TypeVar("Result")


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

    def computed_by_first(self, share: Any, compute: Callable[[list[Any]], Result]) -> Result:
        """What the first process computes from the shares of all of them; every process gets it."""
        if self.count == 1:
            return compute([share])
        shares: list[Any] | None = [None] * self.count if self.first else None
        dist.gather_object(share, shares)
        results: list[Any] = [None]
        try:
            if shares is not None:
                results = [compute(shares)]
        finally:
            # Also when it fails: the others wait for it.
            dist.broadcast_object_list(results, src=0)
        if results[0] is None:
            raise RunStoppedError("the first process could not score the results.")
        return cast(Result, results[0])

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


def set_up_torch(recipe: Recipe) -> None:
    """Threads and determinism, which hold for the whole process."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.deterministic:
        # cuBLAS refuses to be deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def to_device(model: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """The model on the device, its weights laid out as its images are."""
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if recipe.channels_last else model


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """The precision of the recipe; float32 is none."""
    enabled = recipe.precision != "float32"
    return torch.autocast(device.type, getattr(torch, recipe.precision) if enabled else None, enabled=enabled)


# The last one comes when a terminal is closed; Windows has none.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
# Whoever passes a signal on, as `timeout` does, lets it come twice at once; people take longer.
AGAIN = 1.0


class Interruption:
    """While entered, the first signal is noted in `signal`; one that comes later ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._noted_at = 0.0
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run is to end; also where torchrun, which would restart it, was killed."""
        return self.signal is not None or (self._parent is not None and os.getppid() != self._parent)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at >= AGAIN:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            # What `nohup` or a shell has told the process to ignore stays ignored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def ignore_signals(worker: int) -> None:
    """What a process that reads images does about signals: it ends when the one that trains does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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
