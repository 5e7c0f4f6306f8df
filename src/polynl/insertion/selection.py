"""Which tensor of a module's call a block gets: an argument or the output, or an item inside it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polynl.errors import shortened

Item = str | int | None
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Argument:
    """An argument of `forward`, by position or keyword; its call is the pair (args, kwargs)."""

    position: int | None
    name: str | None
    items: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join([str(self.position if self.name is None else self.name), *self.items])

    def path(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Path:
        """Where the tensor is in the call."""
        args, kwargs = call
        if self.name is not None and self.name in kwargs:
            return _keys(call, (1, self.name), self.items)
        if self.position is not None and self.position < len(args):
            return _keys(call, (0, self.position), self.items)
        found = _choices("argument", {**dict(enumerate(args)), **kwargs})
        raise LookupError(f"no argument {self}{found}")


@dataclass(frozen=True)
class Output:
    """The output of a module, or an item of it; its call is the output."""

    items: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join(self.items)

    def path(self, call: Any) -> Path:
        """Where the tensor is in the output."""
        return _keys(call, (), self.items)


Selection = Argument | Output


def selection_of(module: nn.Module, side: str, item: Item) -> Selection:
    """`item` is a name or position, with dots before items inside: "x", 1, "features.0"."""
    head, *items = (None,) if item is None else str(item).split(".")
    if side == "after":
        return Output(() if head is None else (head, *items))
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if head is None and not by_position:
        return Argument(0, named[0] if named else None)
    if head is None or head.isdecimal():
        position = 0 if head is None else int(head)
        return Argument(position, dict(enumerate(by_position)).get(position), tuple(items))
    if head not in named and not any(p.kind == p.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"argument={item!r}: the forward of {type(module).__name__} takes {shortened(named) or 'none'}"
        )
    return Argument(by_position.index(head) if head in by_position else None, head, tuple(items))


def picked(value: Any, path: Path) -> Any:
    """What is at the path."""
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """The value with something else at the path; containers on the way are copied."""
    if not path:
        return new
    item = replaced(value[path[0]], path[1:], new)
    if type(value) is dict:  # torch.compile cannot follow copy.copy
        return {**value, path[0]: item}
    if isinstance(value, Mapping):
        twin: Any = copy.copy(value)
        twin[path[0]] = item
        return twin
    items = [*value[: path[0]], item, *value[path[0] + 1 :]]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def described(value: Any, selection: Selection) -> torch.Size | str:
    """The shape of a tensor; words for anything else that was selected, with the items to select instead."""
    if isinstance(value, Tensor):
        return value.shape
    if not isinstance(value, Mapping | tuple | list):
        return type(value).__name__
    items = value if isinstance(value, Mapping) else dict(enumerate(value))
    option, start = ("argument", f"{selection}.") if isinstance(selection, Argument) else ("output", "")
    return f"{type(value).__name__} of {len(value)}{_choices(option, items, start)}"


def _keys(call: Any, path: Path, items: tuple[str, ...]) -> Path:
    """The path, and the keys of the items after it: numbers in sequences, names or numbers in mappings."""
    value = picked(call, path)
    for item in items:
        number = int(item) if item.isdecimal() else None
        if isinstance(value, Mapping):
            key: Any = item if item in value else number
            known = key in value
        else:
            key, known = number, isinstance(value, tuple | list) and number in range(len(value))
        if not known:
            raise LookupError(f"no item {item!r} in a {type(value).__name__}")
        path, value = (*path, key), value[key]
    return path


def _choices(option: str, values: Mapping[Any, Any], start: str = "") -> str:
    tensors = [
        f"{start}{key} of shape {tuple(v.shape)}" for key, v in values.items() if isinstance(v, Tensor)
    ]
    return f"; choose one with {option}=: {shortened(tensors, 8)}" if tensors else ""
