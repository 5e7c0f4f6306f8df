"""Runs to stop, kill and resume: a tiny recipe, real processes, and images that make them wait.

To import polynl takes a process seconds, so most of them are forked from one that has done it; from there on
they are what `python -m polynl …` and torchrun with it are. Where a test needs a run at a certain moment, an
image of its data is a pipe: the run waits for the image, and the test has all the time it wants.
"""

from __future__ import annotations

import contextlib
import csv
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from fork_server import fork_server
from PIL import Image

from polynl.train.checkpoint import load_checkpoint
from polynl.train.loading import TrainSampler

CLASSES, TRAIN_IMAGES, VAL_IMAGES = 6, 25, 13
EPOCHS, BATCH, STEPS = 2, 4, 6
# Long after what is waited for has come, or never will.
DEADLINE = 100.0


def make_images(root: Path) -> Path:
    """An ImageFolder whose classes differ in brightness."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", TRAIN_IMAGES), ("val", VAL_IMAGES)):
        for number in range(count):
            label = number % CLASSES
            pixels = torch.randint(100, (24, 20, 3), generator=generator, dtype=torch.uint8) + 25 * label
            path = root / split / f"class{label}" / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(path)
    return root


def write_recipe(file: Path, images: Path, **changes: Any) -> Path:
    """Random crops, dropout, batch norm and momentum: state that a resumed run must restore."""
    content: dict[str, Any] = {
        "task": "classification",
        "epochs": EPOCHS,
        "batch": BATCH,
        "model": {"arch": "small_resnet", "arch_options": {"width": 4, "dropout": 0.2}},
        "data": {"source": "image_folder", "root": str(images), "size": 16, "resize": 18},
        "optimizer": {"lr": 0.03},
        "schedule": {"name": "cosine"},
        "val_batch": 2,
        "checkpoint_every": 4,
        "device": "cpu",
        "threads": 1,
    }
    file.write_text(yaml.safe_dump(content | changes))
    return file


def figures(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without the columns that are times."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]


def outcome(folder: Path) -> tuple[bytes, bytes, list[dict[str, str]]]:
    """Everything that must be identical in two runs of one recipe, bit for bit."""
    weights = ((folder / f"{name}.safetensors").read_bytes() for name in ("last", "best"))
    return *weights, figures(folder)


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.005)


def wait_for_end(processes: Sequence[int]) -> None:
    wait_until(lambda: not any(map(alive, processes)), f"the end of processes {processes}")


def alive(process: int) -> bool:
    """Whether the process is alive, not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False


class Gate:
    """An image that a run can read only when the test lets it."""

    def __init__(self, path: Path) -> None:
        self._path, self._content, self._pipe = path, path.read_bytes(), -1
        self._replace(os.mkfifo)

    @classmethod
    def at_step(cls, images: Path, *, epoch: int, step: int, batch: int = BATCH) -> Gate:
        """Wait before a step, counted from 0; of several processes, the last one waits."""
        order = TrainSampler(TRAIN_IMAGES, batch=batch, rank=0, processes=1, seed=0, epoch=epoch)
        *_, (_, index) = list(order)[step]
        return cls(sorted((images / "train").rglob("*.png"))[index])

    @classmethod
    def in_scoring(cls, images: Path) -> Gate:
        """Wait during evaluation; of three processes, the second waits."""
        return cls(sorted((images / "val").rglob("*.png"))[7])

    def wait(self, run: Started, *, epoch: int = 0) -> None:
        """Block until a process reads the image; in epochs before this one, let it pass."""
        for passed in range(epoch + 1):
            wait_until(lambda: self._has_reader(run), f"a reader of {self._path}")
            if passed < epoch:
                self.open(once=True)

    def _has_reader(self, run: Started) -> bool:
        assert run.running, f"it has ended: {run.said}"
        try:
            self._pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        return True

    def open(self, *, once: bool = False) -> None:
        """Deliver the image to its reader; with `once`, the next reader waits again."""
        self._replace(os.mkfifo if once else lambda path: path.write_bytes(self._content))
        if self._pipe >= 0:
            # A reader that was killed in the meantime does not mind.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, self._content)
            os.close(self._pipe)
        self._pipe = -1

    def _replace(self, make: Callable[[Path], Any]) -> None:
        fresh = self._path.with_suffix(".fresh")
        make(fresh)
        os.replace(fresh, self._path)


class Fork:
    """A function in its own process, with the interface of `subprocess.Popen`."""

    def __init__(self, context: Any, function: Callable[..., None], *arguments: Any) -> None:
        self.args = arguments
        self._process = context.Process(target=function, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.args), timeout or 0)
        return self._process.exitcode


class Started:
    """A process that leads its own process group, and its output."""

    def __init__(self, process: Any, log: Path) -> None:
        self._process, self._log = process, log
        self.pid: int = process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int, *, to_group: bool = False) -> None:
        """`to_group`: also to its child processes, as a terminal does."""
        (os.killpg if to_group else os.kill)(self.pid, number)

    def wait(self) -> int:
        """The exit code; if negative, the signal that killed it."""
        try:
            return self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end; it said: {self.said}") from None

    @property
    def said(self) -> str:
        return self._log.with_suffix(".out").read_text() + self.complaints

    @property
    def complaints(self) -> str:
        return self._log.with_suffix(".err").read_text()

    @property
    def workers(self) -> list[int]:
        """Its child processes."""
        return [int(word) for word in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]


class Runner:
    """Starts runs, and stops those still running at the end."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._groups, self._count = logs, set[int](), 0
        self._server = fork_server()

    def polynl(self, *words: object, **hooks: Any) -> Started:
        return self._forked(run_polynl, words, hooks)

    def torchrun(self, *words: object, processes: int = 2, restarts: int = 0) -> Started:
        return self._forked(run_torchrun, processes, restarts, words)

    def command(self, *command: object) -> Started:
        """A command as a user types it, including seconds of imports."""
        log = self._log()
        with open(log.with_suffix(".out"), "wb") as out, open(log.with_suffix(".err"), "wb") as err:
            words = [sys.executable, *map(str, command)]
            process = subprocess.Popen(words, stdout=out, stderr=err, start_new_session=True)
        return self._noted(process, log)

    def clean_up(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def note_workers(self, torchrun: Started) -> list[int]:
        """The processes started by torchrun, which lead their own groups."""
        self._groups.update(torchrun.workers)
        return torchrun.workers

    def _forked(self, function: Callable[..., None], *arguments: Any) -> Started:
        log, method = self._log(), multiprocessing.get_start_method()
        return self._noted(Fork(self._server, _as_leader, log, method, function, *arguments), log)

    def _log(self) -> Path:
        self._count += 1
        return self._logs / f"run{self._count}"

    def _noted(self, process: Any, log: Path) -> Started:
        self._groups.add(process.pid)
        return Started(process, log)


def _as_leader(log: Path, method: str, function: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    heed_signals()
    # What a process has that was not forked from a server of forks.
    multiprocessing.set_start_method(method, force=True)
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    function(*arguments)


def run_polynl(words: Sequence[object], hooks: Mapping[str, Any]) -> None:
    """`python -m polynl WORDS`; `dies_at`: killed before it renames a file for the nth time;
    `more_files`: how many more than now it may open; `unread`: nobody reads its output.
    """
    from polynl.__main__ import main

    if "dies_at" in hooks:
        sys.addaudithook(_Death(hooks["dies_at"]))
    if "more_files" in hooks:
        most = len(os.listdir("/proc/self/fd")) + hooks["more_files"]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if hooks.get("unread"):
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    sys.argv = ["polynl", *map(str, words)]
    main()


class _Death:
    """Kills the process when it is about to rename a file, and leaves the file half written."""

    def __init__(self, countdown: int) -> None:
        self._countdown = countdown

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            self._countdown -= 1
            if self._countdown == 0:
                source = Path(arguments[0])
                if source.suffix == ".tmp":
                    os.truncate(source, source.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)


def run_torchrun(processes: int, restarts: int, words: Sequence[object]) -> None:
    """`torchrun --standalone --nproc-per-node PROCESSES --max-restarts RESTARTS -m polynl WORDS`."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    # Without it a restart may meet addresses of the processes before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    subprocess_handler.SubprocessHandler._popen = _torchrun_worker  # type: ignore[method-assign]
    options = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    run.main([*options, "-m", "polynl", *map(str, words)])


def _torchrun_worker(handler: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
    words = list(command)[list(command).index("polynl") + 1 :]
    return Fork(multiprocessing.get_context("fork"), _as_worker, environment, words)


def _as_worker(environment: Mapping[str, str], words: Sequence[str]) -> None:
    os.setsid()
    heed_signals()
    os.environ.update(environment)
    run_polynl(words, {})


def heed_signals() -> None:
    """Restore the default signal handlers, which a background shell may have changed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def at(checkpoint: Path) -> tuple[int, int]:
    """Completed epochs and steps."""
    state = load_checkpoint(checkpoint)
    return state["epoch"], state["step"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_short(message: str, lines: int = 3) -> None:
    assert len(message.splitlines()) <= lines, message
    assert "Traceback" not in message, message
