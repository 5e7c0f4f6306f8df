"""The forward hooks that run an inserted block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polynl.blocks.base import Block
from polynl.insertion.layouts import OTHER_PLACES, channels_last_layout, described


def attach(module: nn.Module, side: str, block: nn.Module) -> None:
    """Make the block a child of the module and register the hook that runs it."""
    child = f"polynl_{side}"
    module.add_module(child, block)
    register = module.register_forward_pre_hook if side == "before" else module.register_forward_hook
    # Also kept on the module because unpickling a handle reserves its id: otherwise the next hook
    # registered in the new process could get the same id and silently replace this one.
    setattr(module, f"{child}_handle", register(HOOKS[child]))
    # torch.compile does not look at hooks when it decides whether a graph fits: it would run that of an equal
    # module without a block. It does look at whether a module has a forward of its own.
    if "forward" not in vars(module):
        module.forward = module.forward


def detach(module: nn.Module, child: str) -> None:
    """Undo `attach`, and forget what made the block."""
    vars(module).pop(f"{child}_handle").remove()
    vars(module).pop(f"{child}_made_by", None)
    delattr(module, child)
    if not any(is_attached(module, other) for other in HOOKS) and _has_own_forward_of_class(module):
        del module.forward


def _has_own_forward_of_class(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is type(module).forward


def is_attached(module: nn.Module, child: str) -> bool:
    """Whether a block is there and runs."""
    return f"{child}_handle" in vars(module)


def _run_before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args:
        raise TypeError(f"{type(module).__name__} has a block before it: pass its input by position")
    return (_run(module, "before", args[0]), *args[1:])


def _run_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _run(module, "after", output)


# They look the block up on the module they are called with, so that copies and pickles run their own.
HOOKS: dict[str, Callable[..., Any]] = {"polynl_before": _run_before, "polynl_after": _run_after}


def _run(module: nn.Module, side: str, x: Any) -> Any:
    block = getattr(module, f"polynl_{side}")
    if isinstance(x, torch.fx.Proxy):
        return block(x)
    place = f"the block {side} {type(module).__name__}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{place} needs one tensor (b, c, *spatial), got {described(x)}")
    if isinstance(block, Block) and x.dim() > 2 and x.shape[1] != block.channels:
        raise ValueError(f"{place} {_misfit(block.channels, x.shape)}")
    return block(x)


def _misfit(channels: int, shape: torch.Size) -> str:
    if shape[-1] == channels:
        layout = channels_last_layout(len(shape))
        return (
            f"needs (b, {channels}, *spatial), got what looks like {layout} of shape {tuple(shape)}: "
            f"remove it with polynl.remove, then {OTHER_PLACES.format(channels=channels)}"
        )
    return (
        f"was made for {channels} channels, got {shape[1]} in a tensor of shape {tuple(shape)}: "
        f"remove it with polynl.remove, then insert it with channels={shape[1]}"
    )
