"""One forward pass that finds how many channels pass each place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polynl.blocks.base import layers_of_blocks
from polynl.insertion.layouts import Layouts, tells_layout
from polynl.insertion.places import Place, home

# The spatial size of a guessed input, by the rank of the convolution it is guessed from. U-shaped networks
# halve every axis five times.
GUESSED_SIZES = {1: (1024,), 2: (224, 224), 3: (32, 64, 64)}


def widths_of(model: nn.Module, places: Sequence[Place], example: Any) -> list[int]:
    """The channels at every place; a ValueError where no block can go."""
    layouts = Layouts()
    args: tuple[Any, ...] = ()
    cause = None
    try:
        with ExitStack() as hooks, at_rest(model), torch.no_grad():
            for place in places:
                hooks.enter_context(place.module.register_forward_hook(place.watch, with_kwargs=True))
            inside = layers_of_blocks(model)
            for layer in filter(tells_layout, model.modules()):
                if layer not in inside:
                    hooks.enter_context(layer.register_forward_hook(layouts.watch))
            given = _guessed_input(model) if example is None else example
            args = given if isinstance(given, tuple) else (given,)
            model(*args)
    except Exception as error:
        # Ignored if every place has been reached: a head may need inputs of another size.
        cause = error
    missed = ", ".join(str(place) for place in places if not place.seen)
    if missed and cause is not None:
        source = "an input guessed from the model" if example is None else "the example"
        raise ValueError(
            f"could not find the channels {missed}: the forward pass with {source} failed with "
            f"{type(cause).__name__}: {cause}\nPass an input that the model takes as example=, or channels= "
            "and no example="
        ) from cause
    if missed:
        raise ValueError(f"no block can go {missed}: the model's forward pass does not call it")
    spatial = next((arg.shape[2:] for arg in args if isinstance(arg, Tensor)), torch.Size())
    for place in places:
        for value in place.seen:
            _check_feature_map(place, value, layouts, spatial)
    return [place.width() for place in places]


def _check_feature_map(place: Place, value: torch.Size | str, layouts: Layouts, spatial: torch.Size) -> None:
    if isinstance(value, str):
        problem: str | None = f"got {value}"
    elif len(value) < 3:
        problem = f"got a tensor of shape {tuple(value)}"
    else:
        problem = layouts.problem(value, spatial)
    if problem is not None:
        raise ValueError(f"no block can go {place}: it needs one tensor (b, c, *spatial), {problem}")


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Eval mode; every training flag and the random state are restored afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for module, _ in flags:
                module.training = False
            yield
        finally:
            for module, flag in flags:
                module.training = flag


def _guessed_input(model: nn.Module) -> Tensor:
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    if not convolutions:
        raise ValueError(f"{type(model).__name__} has no convolution to guess an input from")
    # Images have few channels; the first convolution registered need not be the first that is called.
    first = next((m for m in convolutions if 1 <= m.in_channels <= 4), convolutions[0])
    rank = len(first.kernel_size)
    cfg = getattr(model, "pretrained_cfg", None)
    known = cfg.get("input_size") if isinstance(cfg, Mapping) else None
    size = known[1:] if known is not None and len(known) == rank + 1 else GUESSED_SIZES[rank]
    return torch.zeros((1, first.in_channels, *size), **home(first, model))
