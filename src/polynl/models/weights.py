"""Load weights from files, all of them or none."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from polynl.errors import shortened
from polynl.insertion import inserted
from polynl.models.about import ENTRY, About, described_in, differences, parsed, told

# Where training checkpoints have the weights: those of polynl and torchvision, and those of many others.
TRAINING_KEYS = ("model", "state_dict", "model_state_dict")
WRAPPER = "module."


class MisfitError(ValueError):
    """Weights of another model; `keys` are those that do not fit."""

    def __init__(self, message: str, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = frozenset(keys)


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    without: Sequence[str] = (),
    *,
    heads: Sequence[str] = (),
    trained: bool = False,
    name: str | None = None,
) -> list[str]:
    """Load a state dict from a file that has all of the model's keys; an inserted block may be missing.

    Values are converted to the model's dtype. If something does not fit, a MisfitError says what, and nothing
    is loaded; nor is anything from a file that is damaged or has values that are not finite, which is a
    ValueError. A model on the meta device is only checked. Modules named in `without` keep their values,
    whatever the file contains; so do layers named in `heads`, such as a classifier, if the file has them with
    another number of outputs, and these are returned. With `trained`, blocks may not be missing: the model
    would be scored with an untrained one. `name` is what errors call the model (default: its class).

    A file that a run has written also says what shapes do not tell, such as strides and options of blocks; if
    the model differs in these, that is a MisfitError too.
    """
    misfit = f"{os.fspath(path)!r} does not fit the {type(model).__name__ if name is None else name}"
    state, about = read_state(path)
    trained_as = f". It was trained with {told(about)}" if about is not None and told(about) else ""
    kept = [head for head in heads if _outputs_differ(model.get_submodule(head), state.get(f"{head}.weight"))]
    left_out = tuple(f"{name}." for name in (*without, *kept))
    state = {key: value for key, value in state.items() if not key.startswith(left_out)}
    blocks = [] if trained else [f"{name}." for name in inserted(model)]
    absent = tuple(block for block in blocks if not any(key.startswith(block) for key in state))
    # PyTorch itself finds what does not fit, on a copy without values: modules know the names that their
    # weights had in older files.
    copy = deepcopy(model).to("meta")
    own = copy.state_dict()
    mismatched = {key for key in own.keys() & state.keys() if not _fits(own[key], state[key])}
    sound = {key: value for key, value in state.items() if key not in mismatched}
    try:
        missing, unexpected = copy.load_state_dict(sound, strict=False, assign=True)
    except RuntimeError as error:  # shapes differ under an older name
        raise MisfitError(f"{misfit}: {error}") from error
    problems = {
        "missing": [key for key in missing if not key.startswith((*absent, *left_out))],
        "unexpected": unexpected,
        "these shapes differ": [
            f"{key} is {tuple(state[key].shape)}, expected {tuple(own[key].shape)}"
            for key in sorted(mismatched)
        ],
    }
    # Files older than PyTorch 0.4.1 and frozen norms have no num_batches_tracked; it changes no output.
    for kind in ("missing", "unexpected"):
        wrong = {key for key in problems[kind] if not key.endswith(".num_batches_tracked")} - mismatched
        problems[kind] = sorted(wrong)
    if any(problems.values()):
        said = "; ".join(f"{kind}: {shortened(keys)}" for kind, keys in problems.items() if keys)
        keys = [*problems["missing"], *problems["unexpected"], *mismatched]
        raise MisfitError(f"{misfit}, {said}{trained_as}", keys)
    if about is not None and (differing := differences(about, model, left_out)):
        what = shortened(list(differing.values()))
        raise MisfitError(f"{misfit}, though all shapes agree: {what}{trained_as}", differing)
    # As the model will hold them: a large number may not be finite in fp32.
    held = {key: value.to(own[key].dtype) if key in own else value for key, value in state.items()}
    if (wrong_values := not_finite(held)) is not None:
        raise ValueError(f"{os.fspath(path)!r} {wrong_values}")
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.load_state_dict(state, strict=False)
    return [head for head in kept if head not in without]


def _outputs_differ(layer: nn.Module, given: Tensor | None) -> bool:
    own = layer.weight
    assert isinstance(own, Tensor)
    return given is not None and given.shape[1:] == own.shape[1:] and given.shape[:1] != own.shape[:1]


def read_state(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], About | None]:
    """The tensors in a file by name, also those of a training checkpoint, and what it says of its network.

    A ValueError if it has none.
    """
    with open(path, "rb"):  # only a file that cannot be opened is an OSError
        pass
    try:
        state, text = _content(path)
    except (pickle.UnpicklingError, LookupError) as error:  # a LookupError if it is not a pickle at all
        raise ValueError(
            f"{os.fspath(path)!r} is not a file of tensors, or contains other objects, which could run any "
            "code and are not loaded"
        ) from error
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{os.fspath(path)!r} is damaged or not a file of tensors: {reason}") from error
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str)
        and isinstance(value, Tensor)
        and not value.is_meta
        and value.layout == torch.strided
        for key, value in state.items()
    ):
        got = f"a dict of {shortened(list(state))}" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"{os.fspath(path)!r} must contain a state dict, tensors by name; got {got}")
    # DistributedDataParallel puts its own name in front of all others.
    wrapped = bool(state) and all(key.startswith(WRAPPER) for key in state)
    if wrapped:
        state = {key.removeprefix(WRAPPER): value for key, value in state.items()}
    return dict(state), parsed(path, text)


def _fits(own: Tensor, given: Tensor) -> bool:
    """Whether the shapes are alike; in older files, α, β and γ have no axis."""
    return given.shape == own.shape or (given.dim() == 0 and own.shape == (1,))


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """Which tensors have NaN or infinite values, in words that follow the file's name; None if none has."""
    wrong = [name for name, value in state.items() if not _is_finite(value)]
    if not wrong:
        return None
    return (
        f"has NaN or infinite values in {len(wrong)} of its {len(state)} tensors, first in {wrong[0]}: "
        "the training that wrote it diverged, or the file was damaged"
    )


def _is_finite(value: Tensor) -> bool:
    # A finite sum has finite terms, and takes a thirtieth of the time; PyTorch does not add floats of 8 bits.
    return (value.itemsize > 1 and bool(value.sum().isfinite())) or bool(value.isfinite().all())


def damaged_entry(path: str | os.PathLike[str]) -> str | None:
    """The first entry of a file of `torch.save` that has changed since: torch.load would not notice."""
    with zipfile.ZipFile(path) as archive:
        # torch.load leaves the memory of an entry that is marked as a folder uninitialised.
        marked = (entry.filename for entry in archive.infolist() if entry.external_attr)
        return archive.testzip() or next(marked, None)


def _content(path: str | os.PathLike[str]) -> tuple[Any, str | None]:
    """The state dict in a file, and the text about its network, if it has one."""
    if os.fspath(path).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path), described_in(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    inside = [
        key for key in TRAINING_KEYS if isinstance(state, Mapping) and isinstance(state.get(key), Mapping)
    ]
    if not inside:
        return state, None
    # Other programs may write archives without checksums.
    ours = str(state.get("format")).startswith("polynl ")
    if ours and (damaged := damaged_entry(path)) is not None:
        raise ValueError(f"{damaged} in it has changed")
    return state[inside[0]], state.get(ENTRY) if ours else None
