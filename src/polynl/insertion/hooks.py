"""The forward hooks that run an inserted block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polynl.blocks.base import Block
from polynl.insertion.layouts import Kind, Layout
from polynl.insertion.selection import Item, Selection, described, picked, replaced


class Wiring(NamedTuple):
    """What a block gets of a module's call, and how to read it; `item` is what `insert` was asked for."""

    selection: Selection
    layout: Layout
    item: Item = None


def attach(module: nn.Module, side: str, block: nn.Module, wiring: Wiring) -> None:
    """Make the block a child of the module and register the hook that runs it."""
    child = f"polynl_{side}"
    module.add_module(child, block)
    setattr(module, f"{child}_wiring", wiring)
    if side == "before":
        handle = module.register_forward_pre_hook(HOOKS[child], with_kwargs=True)
    else:
        handle = module.register_forward_hook(HOOKS[child])
    # Also kept on the module because unpickling a handle reserves its id: otherwise the next hook
    # registered in the new process could get the same id and silently replace this one.
    setattr(module, f"{child}_handle", handle)
    # torch.compile does not look at hooks when it decides whether a graph fits: it would run that of an equal
    # module without a block. It does look at whether a module has a forward of its own.
    if "forward" not in vars(module):
        module.forward = module.forward


def detach(module: nn.Module, child: str) -> None:
    """Undo `attach`, and forget what made the block."""
    vars(module).pop(f"{child}_handle").remove()
    for name in ("wiring", "made_by"):
        vars(module).pop(f"{child}_{name}", None)
    delattr(module, child)
    if not any(is_attached(module, other) for other in HOOKS) and _has_own_forward_of_class(module):
        del module.forward


def _has_own_forward_of_class(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is type(module).forward


def is_attached(module: nn.Module, child: str) -> bool:
    """Whether a block is there and runs."""
    return f"{child}_handle" in vars(module)


def wiring_of(module: nn.Module, child: str) -> Wiring:
    """How the block of this name is connected."""
    return vars(module)[f"{child}_wiring"]


def _run_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run(module, "before", (args, kwargs))


def _run_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _run(module, "after", output)


# They look the block up on the module they are called with, so that copies and pickles run their own.
HOOKS: dict[str, Callable[..., Any]] = {"polynl_before": _run_before, "polynl_after": _run_after}


def _run(module: nn.Module, side: str, call: Any) -> Any:
    """The call with the block's output in place of what it got."""
    block = getattr(module, f"polynl_{side}")
    selection, layout, _ = getattr(module, f"polynl_{side}_wiring")
    place = f"the block {side} {type(module).__name__}"
    try:
        path = selection.path(call)
    except LookupError as error:
        raise TypeError(f"{place} got {error.args[0]}") from None
    x = picked(call, path)
    if not isinstance(x, torch.fx.Proxy):
        _check(place, block, layout, x, selection)
    return replaced(call, path, layout.run(block, x))


def _check(place: str, block: nn.Module, layout: Layout, x: Any, selection: Selection) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{place} needs one tensor, {layout}, got {described(x, selection)}")
    if not isinstance(block, Block) or x.dim() < 3 or layout.channels(x.shape) == block.channels:
        return
    shape, first = tuple(x.shape), layout.kind == "channels_first"
    if x.shape[-1 if first else 1] == block.channels:
        last: Kind = "tokens" if x.dim() == 3 else "channels_last"
        other = Layout(last if first else "channels_first")
        raise ValueError(
            f"{place} needs {layout} with {block.channels} channels, got what looks like {other} of shape "
            f"{shape}: remove it with polynl.remove, then insert it with layout={other.kind!r}"
        )
    channels = layout.channels(x.shape)
    raise ValueError(
        f"{place} was made for {block.channels} channels, got {channels} in a tensor of shape {shape}: "
        f"remove it with polynl.remove, then insert it with channels={channels}"
    )
