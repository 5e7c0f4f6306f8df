"""One forward pass that finds how many channels pass each place, and on which axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polynl.blocks.base import layers_of_blocks
from polynl.insertion.evidence import Evidence, tells_layout
from polynl.insertion.layouts import Layout, Wanted
from polynl.insertion.places import Place, claimed_prefix, home

# The spatial size of a guessed input, by the rank of the convolution it is guessed from. U-shaped networks
# halve every axis five times.
GUESSED_SIZES = {1: (1024,), 2: (224, 224), 3: (32, 64, 64)}


class Fit(NamedTuple):
    """What a block has to fit at its place."""

    channels: int
    layout: Layout


def fits_of(model: nn.Module, places: Sequence[Place], wanted: Wanted, example: Any) -> list[Fit]:
    """The channels and the layout at every place; a ValueError where no block can go."""
    evidence = Evidence()
    cause = None
    try:
        with ExitStack() as hooks, at_rest(model), torch.no_grad():
            for place in places:
                hooks.enter_context(place.module.register_forward_hook(place.watch, with_kwargs=True))
            inside = layers_of_blocks(model)
            for layer in filter(tells_layout, model.modules()):
                if layer not in inside:
                    hooks.enter_context(layer.register_forward_hook(evidence.watch))
            given = _guessed_input(model) if example is None else example
            args = given if isinstance(given, tuple) else (given,)
            evidence.input = next((arg.shape for arg in args if isinstance(arg, Tensor)), torch.Size())
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
    return [_fit(place, evidence, wanted, claimed_prefix(model, place)) for place in places]


def _fit(place: Place, evidence: Evidence, wanted: Wanted, hint: int | None) -> Fit:
    layouts = []
    try:
        for value in place.seen:
            if isinstance(value, str):
                raise ValueError(f"got {value}")
            if not 3 <= len(value) <= 5:
                raise ValueError(f"got a tensor of shape {tuple(value)}")
            layouts.append(evidence.layout(value, wanted, hint))
    except ValueError as error:
        raise ValueError(f"no block can go {place}: it needs one map or tokens, {error}") from None
    if len({layout.kind for layout in layouts}) > 1:
        raise ValueError(f"no block can go {place}: it is called with {' and '.join(map(str, layouts))}")
    return Fit(place.width(layouts[0]), layouts[0])


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
    size = _claimed_size(model)
    size = size if size is not None and len(size) == rank else GUESSED_SIZES[rank]
    return torch.zeros((1, first.in_channels, *size), **home(first, model))


def _claimed_size(model: nn.Module) -> Sequence[int] | None:
    """The size of images that a model of timm was built for, or else that its weights were trained with."""
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(built_for, Sequence):
        return built_for
    cfg = getattr(model, "pretrained_cfg", None)
    known = cfg.get("input_size") if isinstance(cfg, Mapping) else None
    return None if known is None else known[1:]
