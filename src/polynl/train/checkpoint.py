"""Checkpoints: written atomically, read without executing code, the previous one kept."""

from __future__ import annotations

import io
import os
import pickle
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.models.about import ENTRY, About
from polynl.models.weights import damaged_entry, not_finite

FORMAT = "polynl training checkpoint 1"
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
LAST_WEIGHTS, BEST_WEIGHTS = "last.safetensors", "best.safetensors"
# In a folder of `save_pretrained`, and on the Hub.
SHARED_WEIGHTS = "model.safetensors"
# What the training loop saves, besides the format.
CONTENT: dict[str, type] = {
    "images": int,
    "batch": int,
    "epoch": int,
    "step": int,
    "rows": list,
    "model": dict,
    "optimizer": dict,
    "scaler": dict,
    "shares": list,
}
# What every process adds to `shares`.
SHARE = {"random", "totals"}
# The names of last.pt before it is complete, and after it was found damaged.
FRESH, DAMAGED = ".last.pt.new", "last.pt.damaged"


class CheckpointError(SettingsError):
    """A file that is damaged or not a checkpoint."""


def save_checkpoint(
    folder: Path, state: dict[str, Any], *, best: bool = False, keep: Literal["all", "last"] = "all"
) -> None:
    """Write `last.pt` and keep its predecessor as `previous.pt`; with `best`, write `best.pt` too.

    With `keep="last"`, there is only `last.pt`: others of the run are deleted once it is written.
    """
    others = keep == "all"
    content = io.BytesIO()
    torch.save({"format": FORMAT, **state}, content)
    # Before last.pt: a run killed in between resumes from the old one and writes best.pt again.
    if best and others:
        write_atomically(folder / BEST, content.getbuffer())
    write_atomically(folder / FRESH, content.getbuffer())
    if others and (folder / LAST).exists():
        os.replace(folder / LAST, folder / PREVIOUS)
    os.replace(folder / FRESH, folder / LAST)
    for name in () if others else (PREVIOUS, BEST):
        (folder / name).unlink(missing_ok=True)


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
    if (problem := _problem(state)) is not None:
        raise CheckpointError(f"{path} {problem}.")
    return state


def _problem(state: dict[str, Any]) -> str | None:
    """What is wrong with a state, in words that follow the file's name."""
    lacking = [key for key, kind in CONTENT.items() if not isinstance(state.get(key), kind)]
    if lacking:
        return f"is incomplete: it has no {lacking[0]}"
    if not all(isinstance(share, dict) and share.keys() >= SHARE for share in state["shares"]):
        return f"is incomplete: its shares have no {' and '.join(sorted(SHARE))}"
    if not all(isinstance(value, Tensor) for value in state["model"].values()):
        return "is damaged: its model has values that are not tensors"
    return not_finite(state["model"])


def load_last(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest usable checkpoint, or None if there is none, and what is wrong with newer ones."""
    problems: list[str] = []
    for name in (LAST, PREVIOUS):
        if (folder / name).exists():
            try:
                return load_checkpoint(folder / name), problems
            except CheckpointError as error:
                problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join([*problems, _way_on(folder)]))
    return None, problems


def _way_on(folder: Path) -> str:
    """What can be done if neither `last.pt` nor `previous.pt` can be used."""
    again = "start again with --overwrite, or with another --out to keep these files."
    try:
        epoch = load_checkpoint(folder / BEST)["epoch"]
    except CheckpointError:
        return f"No checkpoint of this run can be used: {again}"
    best, last = (shlex.quote(str(folder / name)) for name in (BEST, LAST))
    return f"To continue after epoch {epoch}: cp {best} {last}, then --resume. Otherwise {again}"


def set_aside_damaged(folder: Path) -> None:
    """Rename a damaged `last.pt`, which the next save would otherwise move over the good `previous.pt`."""
    os.replace(folder / LAST, folder / DAMAGED)


def export_weights(path: Path, weights: Mapping[str, Tensor], about: About) -> None:
    """Write the weights alone, as safetensors, with what they are of in the metadata."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    # One entry: safetensors writes several in any order, and equal runs are to write equal files.
    write_atomically(path, safetensors_bytes(plain, {ENTRY: about.to_json()}))
