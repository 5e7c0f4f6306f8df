"""The machine and software of a run: what is needed to judge its results, without personal data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import polynl

PACKAGES = ("torch", "torchvision", "numpy", "timm", "mmcv-lite")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")


def environment(device: str) -> dict[str, Any]:
    """Versions, processor, threads and commit, ready for JSON."""
    found: dict[str, Any] = {
        "polynl": polynl.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def cpu_model() -> str:
    """The processor's name, or its architecture if the system does not give the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this checkout, followed by "+" if files were changed; None if installed."""
    here = Path(__file__)
    # A copy installed inside another checkout does not belong to that checkout's commit.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    changed = _git(here.parent.parent, "status", "--porcelain", "--untracked-files=no", "--", ".")
    head = _git(here.parent, "rev-parse", "HEAD")
    return None if head is None else head + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str | None:
    try:
        # Reading the status must not lock the index while somebody commits.
        command = ["git", "--no-optional-locks", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
