"""Loading weights from files, all of them or none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polynl.models.insert import inserted


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a state dict from a file that has all of the model's keys; an inserted block may be missing whole.

    Values are converted to the model's dtype. If something does not fit, nothing is loaded.
    """
    own, state = model.state_dict(), _read(path)
    absent = tuple(f"{name}." for name in inserted(model) if not any(k.startswith(f"{name}.") for k in state))
    # Files older than PyTorch 0.4.1 have no num_batches_tracked, and load_state_dict takes them.
    optional = (key for key in own if key.startswith(absent) or key.endswith(".num_batches_tracked"))
    problems = {
        "missing": sorted(own.keys() - state.keys() - set(optional)),
        "unexpected": sorted(state.keys() - own.keys()),
        "of another shape": [
            f"{key} {tuple(state[key].shape)}, not {tuple(own[key].shape)}"
            for key in sorted(own.keys() & state.keys())
            if own[key].shape != state[key].shape
        ],
    }
    if any(problems.values()):
        lines = [f"  {kind}: {_shortened(keys)}" for kind, keys in problems.items() if keys]
        raise ValueError("\n".join([f"{os.fspath(path)!r} does not fit the {type(model).__name__}:", *lines]))
    model.load_state_dict(state, strict=False)


def _read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    if os.fspath(path).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(state, Mapping) and isinstance(state.get("model"), Mapping):  # a training checkpoint
        state = state["model"]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        got = f"a dict of {_shortened(list(state))}" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"{os.fspath(path)!r} must hold a state dict, tensors by name; got {got}")
    return dict(state)


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
