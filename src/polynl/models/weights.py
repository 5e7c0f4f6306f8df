"""Loading weights from files, all of them or none."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from polynl.insertion import inserted


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], without: Sequence[str] = (), *, trained: bool = False
) -> None:
    """Load a state dict from a file that has all of the model's keys; an inserted block may be missing whole.

    Values are converted to the model's dtype. If something does not fit, nothing is loaded. Modules named in
    `without`, a classifier for other classes for one, stay as they are, whatever the file has of them. Of a
    `trained` model no block may be missing: it would be scored as what it is not.
    """
    model.load_state_dict(fitting_weights(model, path, without, trained=trained), strict=False)


def fitting_weights(
    model: nn.Module, path: str | os.PathLike[str], without: Sequence[str] = (), *, trained: bool = False
) -> dict[str, Tensor]:
    """What `load_weights` would load; a ValueError says what does not fit."""
    left_out = tuple(f"{name}." for name in without)
    state = {key: value for key, value in _read(path).items() if not key.startswith(left_out)}
    blocks = [] if trained else [f"{name}." for name in inserted(model)]
    absent = tuple(block for block in blocks if not any(key.startswith(block) for key in state))
    # Torch itself finds what does not fit, on a copy without values: modules know the names that their own
    # weights had in older files.
    copy = deepcopy(model).to("meta")
    own = copy.state_dict()
    mismatched = {key for key in own.keys() & state.keys() if own[key].shape != state[key].shape}
    sound = {key: value for key, value in state.items() if key not in mismatched}
    try:
        missing, unexpected = copy.load_state_dict(sound, strict=False, assign=True)
    except RuntimeError as error:  # of another shape, under an older name
        raise ValueError(f"{os.fspath(path)!r} does not fit the {type(model).__name__}: {error}") from error
    problems = {
        "missing": [key for key in missing if not key.startswith((*absent, *left_out))],
        "unexpected": unexpected,
        "of another shape": [
            f"{key} {tuple(state[key].shape)}, not {tuple(own[key].shape)}" for key in sorted(mismatched)
        ],
    }
    # Files older than PyTorch 0.4.1 and frozen norms have no num_batches_tracked; it changes no output.
    for kind in ("missing", "unexpected"):
        wrong = {key for key in problems[kind] if not key.endswith(".num_batches_tracked")} - mismatched
        problems[kind] = sorted(wrong)
    if any(problems.values()):
        said = "; ".join(f"{kind}: {_shortened(keys)}" for kind, keys in problems.items() if keys)
        raise ValueError(f"{os.fspath(path)!r} does not fit the {type(model).__name__}, {said}")
    return state


def check_left_out(model: nn.Module, names: Sequence[str]) -> None:
    """Raise a ValueError for modules whose weights are to be left out, and that the model does not have."""
    for name in names:
        if not any(key.startswith(f"{name}.") for key in model.state_dict()):
            raise ValueError(f"weights_without: the {type(model).__name__} has no weights below {name!r}")


def _read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    with open(path, "rb"):  # a file that cannot be opened is an OSError, whatever comes out of it is not
        pass
    try:
        state = _content(path)
    except (pickle.UnpicklingError, LookupError) as error:  # the latter of what is no pickle at all
        raise ValueError(
            f"{os.fspath(path)!r} is no file of tensors, or holds other objects beside them, which could run "
            "any code and are not loaded"
        ) from error
    except Exception as error:  # there is no end to what a damaged file raises
        raise ValueError(
            f"{os.fspath(path)!r} is damaged or no file of tensors: {_first_line(error)}"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        got = f"a dict of {_shortened(list(state))}" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"{os.fspath(path)!r} must hold a state dict, tensors by name; got {got}")
    return dict(state)


def damaged_entry(path: str | os.PathLike[str]) -> str | None:
    """The first entry of what `torch.save` wrote that has changed since: torch.load would not notice."""
    with zipfile.ZipFile(path) as archive:
        # An entry that is marked as a folder is one whose bytes torch.load leaves as memory had them.
        marked = (entry.filename for entry in archive.infolist() if entry.external_attr)
        return archive.testzip() or next(marked, None)


def _content(path: str | os.PathLike[str]) -> Any:
    if os.fspath(path).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not (isinstance(state, Mapping) and isinstance(state.get("model"), Mapping)):
        return state
    # Others may write archives without sums.
    ours = str(state.get("format")).startswith("polynl ")
    if ours and (damaged := damaged_entry(path)) is not None:
        raise ValueError(f"{damaged} in it has changed")
    return state["model"]  # of a training checkpoint


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
