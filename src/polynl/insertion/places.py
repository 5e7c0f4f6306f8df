"""Sides of modules, found by the modules' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from polynl.errors import near_matches, shortened
from polynl.insertion.layouts import Layout
from polynl.insertion.selection import Item, Output, Selection, described, picked, selection_of

Names = str | Sequence[str] | None


@dataclass(frozen=True)
class Place:
    """One side of a module; `seen` holds the shapes that passed it, or describes what was not a tensor.

    `item` is the argument or the item of the output that was asked for.
    """

    side: str
    name: str
    module: nn.Module
    item: Item = None
    selection: Selection = field(default_factory=Output)
    seen: list[torch.Size | str] = field(default_factory=list)

    def __str__(self) -> str:
        return f'{self.side} "{self.name}" ({type(self.module).__name__})'

    def watch(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook that fills `seen`."""
        call = (args, kwargs) if self.side == "before" else output
        try:
            value = picked(call, self.selection.path(call))
        except LookupError as error:
            self.seen.append(str(error.args[0]))
        else:
            self.seen.append(described(value, self.selection))

    def width(self, layout: Layout) -> int:
        """The number of channels seen."""
        widths = sorted({layout.channels(shape) for shape in self.seen if isinstance(shape, torch.Size)})
        if len(widths) > 1:
            raise ValueError(f"no block can go {self}: it is called with different channel counts {widths}")
        return widths[0]


def check_model(model: object) -> None:
    """Raise a TypeError that says what to do unless this is an nn.Module."""
    if isinstance(model, nn.Module):
        return
    advice = "build the model first"
    if isinstance(model, str):
        advice += f', for example with torchvision.models.get_model("{model}")'
    elif callable(model):
        advice += ": call it"
    got = f"a {type(model).__name__}" if isinstance(model, dict) else repr(model)
    raise TypeError(f"model must be an nn.Module, got {got}; {advice}")


def places_of(model: nn.Module, side: str, names: Names, item: Item = None) -> list[Place]:
    """One side of the modules of these names; `item`: which argument, or item of the output."""
    modules = dict(model.named_modules(remove_duplicate=False))
    places = []
    if names is not None and not isinstance(names, str | Sequence):
        raise TypeError(f"{side}={names!r}: expected the dotted name of a module, or several of them")
    for name in [names] if isinstance(names, str) else names or ():
        if name not in modules:
            children = shortened([*model._modules], 8) or "none"
            hint = near_matches(str(name), modules) or f" Its children are {children}."
            raise ValueError(f"{type(model).__name__} has no module {name!r}.{hint}")
        place = _descended(model, Place(side, name, modules[name], item))
        places.append(replace(place, selection=selection_of(place.module, side, item)))
    return places


def _descended(model: nn.Module, place: Place) -> Place:
    """The place, or the outermost child's if it is a Sequential, which would run the block as a layer."""
    module = place.module
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"no block can go {place}: hooks do not run in a scripted module")
    if type(module).forward is nn.Sequential.forward:
        if len(module._modules) == 0:
            raise ValueError(f"no block can go {place}: it is empty")
        key = list(module._modules)[0 if place.side == "before" else -1]
        child = replace(place, name=joined(place.name, key), module=module.get_submodule(key))
        uses = sum(other is child.module for m in model.modules() for other in m._modules.values())
        if uses > 1:
            raise ValueError(f"no block can go {place}: its child {key!r} is used in {uses} places")
        return _descended(model, child)
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        children = shortened([joined(place.name, key) for key in module._modules], 8)
        raise ValueError(f"no block can go {place}: it iterates over its children; choose one of {children}")
    return place


def check_free(places: Sequence[Place]) -> None:
    """Raise a ValueError if a place is taken, or given twice."""
    sides = [(place.module, place.side) for place in places]
    for place in places:
        if sides.count((place.module, place.side)) > 1 or hasattr(place.module, f"polynl_{place.side}"):
            raise ValueError(f"there is already a block {place}; polynl.remove(model) removes all blocks")


def joined(*names: str) -> str:
    """The names with dots between them; "" is the model itself."""
    return ".".join(name for name in names if name)


def claimed_prefix(model: nn.Module, place: Place) -> int | None:
    """How many prefix tokens the innermost module around the place says there are, as timm's models do."""
    parts = place.name.split(".")
    for length in range(len(parts), -1, -1):
        claim = getattr(model.get_submodule(".".join(parts[:length])), "num_prefix_tokens", None)
        if isinstance(claim, int):
            return claim
    return None


def home(*modules: nn.Module) -> dict[str, Any]:
    """Device and dtype of the first floating-point parameter in the first module that has one."""
    parameters = (p for module in modules for p in module.parameters() if p.is_floating_point())
    return next(({"device": p.device, "dtype": p.dtype} for p in parameters), {})
