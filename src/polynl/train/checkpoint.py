"""Checkpoints: written atomically, read without executing code, the previous one kept."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.models.weights import damaged_entry

FORMAT = "polynl training checkpoint 1"
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
LAST_WEIGHTS, BEST_WEIGHTS = "last.safetensors", "best.safetensors"
# The names of last.pt before it is complete, and after it was found damaged.
FRESH, DAMAGED = ".last.pt.new", "last.pt.damaged"


class CheckpointError(SettingsError):
    """A file that is damaged or not a checkpoint."""


def save_checkpoint(folder: Path, state: dict[str, Any], *, best: bool = False) -> None:
    """Write `last.pt` and keep its predecessor as `previous.pt`; with `best`, write `best.pt` too."""
    content = io.BytesIO()
    torch.save({"format": FORMAT, **state}, content)
    # Before last.pt: a run killed in between resumes from the old one and writes best.pt again.
    if best:
        write_atomically(folder / BEST, content.getbuffer())
    write_atomically(folder / FRESH, content.getbuffer())
    if (folder / LAST).exists():
        os.replace(folder / LAST, folder / PREVIOUS)
    os.replace(folder / FRESH, folder / LAST)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a file, on the CPU; a CheckpointError says what is wrong with the file."""
    try:
        damaged = damaged_entry(path)
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}.") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} was not loaded: it contains more than tensors and plain values, and could execute code."
        ) from error
    except Exception as error:  # a damaged file can raise almost anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {reason}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} in it has changed.")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a training checkpoint of polynl.")
    return state


def load_last(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest readable checkpoint, or None if there is none, and what is wrong with newer ones."""
    problems: list[str] = []
    for name in (LAST, PREVIOUS):
        if (folder / name).exists():
            try:
                return load_checkpoint(folder / name), problems
            except CheckpointError as error:
                problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join([*problems, "No checkpoint of this run can be read."]))
    return None, problems


def set_aside_damaged(folder: Path) -> None:
    """Rename a damaged `last.pt`, which the next save would otherwise move over the good `previous.pt`."""
    os.replace(folder / LAST, folder / DAMAGED)


def export_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write the weights alone, as safetensors."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(path, safetensors_bytes(plain))
