"""A process that has imported what runs need, to fork them from: imports would take each of them seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from typing import Any

# Some of it is imported by a run only when it is needed.
PRELOADED = [
    "polynl.reproduce.trainings",
    "polynl.cli",
    "polynl.tasks.classification.task",
    "PIL.PngImagePlugin",
    "torch.distributed.run",
]


def fork_server() -> Any:
    """The context whose processes are forked from it; it is started once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return context
