"""Processes, devices, signals and random state of a run."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polynl.errors import RunStoppedError, SettingsError
from polynl.train.config import Recipe

# Long enough for a slow first epoch; a process that hangs is torchrun's business.
TIMEOUT = timedelta(minutes=30)
# Seconds in which torchrun notices that a process has died, and stops the others.
TORCHRUN_NOTICES = 10.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """This process among `count`; all processes call the same methods in the same order."""

    rank: int
    count: int
    device: torch.device
    hosts_and_ids: tuple[tuple[str, int], ...] = ()
    """Where each process runs and its id there, in the order of ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """Whether torchrun restarted the processes after one died."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    @property
    def will_restart(self) -> bool:
        """Whether torchrun restarts the processes if one dies now."""
        count, most = (
            os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
        )
        return int(count) < int(most)

    @property
    def launch(self) -> str:
        """An identifier of this torchrun, the same after a restart; empty without torchrun."""
        name = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return f"{socket.gethostname()} {os.getppid()}" if name == "none" else name

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If the body fails in one process, stop all of them when they leave it."""
        problem: SettingsError | RunStoppedError | None = None
        try:
            yield
        except (SettingsError, RunStoppedError) as error:
            problem = error
        for found in self.all_gather(problem):
            if found is not None:
                self.exit_all(found)

    def exit_all(self, error: SettingsError | RunStoppedError) -> NoReturn:
        """Stop all processes, which all call this; the main one reports the error."""
        if self.is_main:
            raise error
        # On a non-zero code torchrun would kill the main process, maybe before it has printed the error.
        raise SystemExit(0)

    def lost(self, error: Exception) -> str | None:
        """Which other processes have died, if that is what the error of a connection means."""
        if self.count == 1 or not _is_of_connection(error):
            return None
        deaths = self._deaths()
        return ", ".join(f"rank {rank} {how}" for rank, how in deaths.items()) or "another process has died"

    def leave(self, error: RunStoppedError, stop: StopRequest | None) -> NoReturn:
        """Stop this process after others have died; of those left, the first to notice reports the error."""
        first = _first_on_this_machine()
        dist.destroy_process_group()  # the others learn of it by this one's closed connections
        # If this process ended first, torchrun and the others would take it for the cause.
        if stop is not None:
            wait_until(lambda: stop.requested, TORCHRUN_NOTICES)
        if first:
            raise error
        raise SystemExit(1)

    def _deaths(self) -> dict[int, str]:
        """How processes on this machine ended, by rank."""
        here = socket.gethostname()
        found: dict[int, str] = {}

        def look() -> bool:
            for rank, (host, process) in enumerate(self.hosts_and_ids):
                how = _death(process) if host == here else None
                if how is not None:
                    found[rank] = how
            return bool(found)

        # The connections of a killed process are closed a moment before it is gone.
        wait_until(look, 1.0)
        return found

    def check_model(self, model: nn.Module) -> None:
        """Raise a SettingsError if these processes cannot train the model."""
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if synced and self.count > 1 and self.device.type == "cpu":
            raise SettingsError("model.norm: sync needs GPUs; on the CPU it is not available.")

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model for training: with several processes, in DistributedDataParallel."""
        if self.count == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the main process's buffers (batch statistics), which are the ones it saves, to all others."""
        if self.count > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set in any process."""
        return tuple(map(bool, self.sums(*flags)))

    def sums(self, *values: float) -> tuple[float, ...]:
        """The values summed over all processes."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of ranks."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def compute_on_main(self, share: Any, compute: Callable[[list[Any]], Result]) -> Result:
        """Compute a result from all shares in the main process, and send it to every process."""
        if self.count == 1:
            return compute([share])
        shares: list[Any] | None = [None] * self.count if self.is_main else None
        dist.gather_object(share, shares)
        result: Result | None = None
        try:
            if shares is not None:
                result = compute(shares)
        finally:
            # Even if it failed: the others are waiting for it.
            result = self.broadcast(result)
        if result is None:
            raise RunStoppedError("the main process could not compute the scores.")
        return result

    def broadcast(self, value: Any) -> Any:
        """The value of the main process."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Join the processes started by torchrun, or run as the only one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: cuda was requested, but PyTorch finds no CUDA device.")
    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Processes(0, 1, torch.device("cuda", 0) if gpu else torch.device("cpu"))
        return
    own_device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(own_device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT)
    try:
        alone = Processes(dist.get_rank(), dist.get_world_size(), own_device)
        yield replace(alone, hosts_and_ids=tuple(alone.all_gather((socket.gethostname(), os.getpid()))))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _first_on_this_machine() -> bool:
    """Whether this is the first of torchrun's processes here that calls this since they were started."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    # torchrun gives each process a folder for this file, within one that is new at every restart.
    folder = os.path.dirname(os.path.dirname(file))
    if folder:
        try:
            os.close(os.open(os.path.join(folder, "polynl_reported"), os.O_CREAT | os.O_EXCL))
        except OSError as error:
            return not isinstance(error, FileExistsError)
    return True


def _is_of_connection(error: Exception) -> bool:
    return any(text in str(error) for text in ("gloo/transport", "ncclRemoteError"))


def _death(process: int) -> str | None:
    """How a process of this machine ended, or None if it is alive or there is no way to tell."""
    if not os.path.exists("/proc/self/stat"):
        return None
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            state, *_, status = file.read().rpartition(")")[2].split()
    except OSError:
        return "has died"
    if state != "Z":
        return None
    code = os.waitstatus_to_exitcode(int(status))
    return f"was killed (signal {-code})" if code < 0 else f"ended with code {code}"


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for the condition, but no longer than so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def set_up_torch(recipe: Recipe) -> None:
    """Set threads and determinism for the whole process."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.deterministic:
        # Required by cuBLAS in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def to_device(model: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """Move the model to the device, in the memory format of its images."""
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if recipe.channels_last else model


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Autocast to the precision of the recipe; disabled for float32."""
    enabled = recipe.precision != "float32"
    return torch.autocast(device.type, getattr(torch, recipe.precision) if enabled else None, enabled=enabled)


# SIGHUP is sent when a terminal closes; Windows does not have it.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
# Seconds after which a second signal counts: `timeout` and others deliver the same one twice at once.
SECOND_SIGNAL_AFTER = 1.0


class StopRequest:
    """While entered, the first signal requests a stop; a later one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._noted_at = 0.0
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether to stop: a signal came, or torchrun itself was killed."""
        return self.signal is not None or (self._parent is not None and os.getppid() != self._parent)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at >= SECOND_SIGNAL_AFTER:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            # Signals ignored because of `nohup` or a shell stay ignored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # torchrun stops all processes when the first ends: the others are about to end by themselves.
            signal.signal(number, handler if self._parent is None else signal.SIG_IGN)


def ignore_signals() -> None:
    """For processes that stop when the one that started them does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The random state of the CPU and, on a GPU, of that device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore a state from `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def preserve_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random state and buffers and clear gradients afterwards."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    model.zero_grad()
