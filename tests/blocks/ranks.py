"""Processes of torch.distributed for tests."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def on_ranks(ranks: int, function: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in processes that gloo connects; what one raises is raised here."""
    multiprocessing.spawn(_call, (ranks, function, folder / "store", arguments), nprocs=ranks)


def _call(rank: int, ranks: int, function: Callable[..., None], store: Path, arguments: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    function(rank, *arguments)
    distributed.destroy_process_group()
    # What holds a group, as FSDP's meshes do, keeps gloo's threads alive: one that drops a tensor while
    # Python shuts down calls abort(), and the process counts as failed.
    os._exit(0)
