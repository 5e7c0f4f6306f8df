"""Put a block before or after any named module of any model, and remove it again.

The block becomes a child of the module it stands next to (`polynl_before` or `polynl_after`), and a forward
hook on that module runs it. No module is wrapped or renamed, so the host's state-dict keys stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polynl.blocks.registry import build_block
from polynl.errors import near_matches, shortened

Model = TypeVar("Model", bound=nn.Module)
Names = str | Sequence[str] | None

# The spatial size of a guessed input, by the rank of the model's first convolution.
GUESSED_SIZES = {1: (1024,), 2: (224, 224), 3: (16, 64, 64)}


def insert(
    model: Model,
    block: str | Callable[..., nn.Module],
    *,
    before: Names = None,
    after: Names = None,
    channels: int | None = None,
    example: Any = None,
    **options: Any,
) -> Model:
    """Put a new block on the input (`before`) or output (`after`) of every named module; return the model.

    `block` is a name in `polynl.BLOCKS`, a block class or any callable; it is called with the channel count
    and `options`. Modules are named as in `model.named_modules()`; "" is the model itself. A block before a
    module gets the module's first positional argument. At a plain `nn.Sequential`, the block goes to the
    outermost child.

    `channels` (default: found by one forward pass in eval mode) is the same for all places. The input of
    that pass is `example`, one argument or a tuple of several (default: guessed from the first convolution).
    If there is an error, the model is left unchanged.

    >>> import torchvision
    >>> model = insert(torchvision.models.resnet18(), "poly_nl", before="layer3.1", reduction=2)
    >>> model.layer3[1].polynl_before.channels
    256
    """
    if isinstance(block, nn.Module) or not (isinstance(block, str) or callable(block)):
        raise TypeError(f"block must be a name, a block class or a callable that makes blocks, got {block!r}")
    if channels is not None and example is not None:
        raise ValueError("give channels or example, not both: the example is only used to find the channels")
    places = [*_places(model, "before", before), *_places(model, "after", after)]
    _check_free(places)
    if channels is None:
        _run_watched(model, places, example)
    blocks = []
    for place in places:
        width = place.width() if channels is None else channels
        new = build_block(block, width, **options) if isinstance(block, str) else block(width, **options)
        if not isinstance(new, nn.Module):
            raise TypeError(f"block must make an nn.Module from the channel count, got {new!r}")
        blocks.append(new.to(**_home(place.module, model)).train(place.module.training))
    for place, new in zip(places, blocks, strict=True):
        place.attach(new)
    return model


def remove(model: Model) -> Model:
    """Remove every block that `insert` put into the model, if any, and return the model."""
    for module in list(model.modules()):
        for child in HOOKS:
            if handle := vars(module).pop(f"{child}_handle", None):
                handle.remove()
                delattr(module, child)
    return model


def inserted(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that `insert` put into the model, by dotted name such as "layer3.5.polynl_before"."""
    return {
        _joined(name, child): module.get_submodule(child)
        for name, module in model.named_modules()
        for child in HOOKS
        if f"{child}_handle" in vars(module)
    }


# Running a block


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
        # Recorded as one node: the block's checks of shapes cannot be traced symbolically.
        tracer: Any = x.tracer
        as_leaf = partial(tracer.create_proxy, "call_module", tracer.path_of_module(block))
        return tracer.call_module(block, lambda x: as_leaf((x,), {}), (x,), {})
    if not isinstance(x, Tensor):
        raise TypeError(
            f"the block {side} {type(module).__name__} needs one tensor (b, c, *spatial), got {_described(x)}"
        )
    return block(x)


# Finding the places


@dataclass(frozen=True)
class _Place:
    """One side of a module; `seen` holds the shapes that passed it, or describes what was not a tensor."""

    side: str
    name: str
    module: nn.Module
    seen: list[torch.Size | str] = field(default_factory=list)

    def __str__(self) -> str:
        return f'{self.side} "{self.name}" ({type(self.module).__name__})'

    def watch(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.side == "before" and not args:
            self.seen.append(f"only keyword arguments ({', '.join(kwargs)})")
        else:
            self.seen.append(_described(args[0] if self.side == "before" else output))

    def width(self) -> int:
        widths = sorted({shape[1] for shape in self.seen if isinstance(shape, torch.Size)})
        if len(widths) > 1:
            raise ValueError(f"no block can go {self}: it is called with different channel counts {widths}")
        return widths[0]

    def attach(self, block: nn.Module) -> None:
        child, module = f"polynl_{self.side}", self.module
        module.add_module(child, block)
        before = self.side == "before"
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        # Also kept on the module because unpickling a handle reserves its id: otherwise the next hook
        # registered in the new process could get the same id and silently replace this one.
        setattr(module, f"{child}_handle", register(HOOKS[child]))


def _places(model: nn.Module, side: str, names: Names) -> list[_Place]:
    modules = dict(model.named_modules(remove_duplicate=False))
    places = []
    if names is not None and not isinstance(names, str | Sequence):
        raise TypeError(f"{side}={names!r}: expected the dotted name of a module, or several of them")
    for name in [names] if isinstance(names, str) else names or ():
        if name not in modules:
            hint = near_matches(str(name), modules) or f" Its children are {shortened([*model._modules], 8)}."
            raise ValueError(f"{type(model).__name__} has no module {name!r}.{hint}")
        places.append(_descended(model, _Place(side, name, modules[name])))
    return places


def _descended(model: nn.Module, place: _Place) -> _Place:
    """The place, or the outermost child's if it is a Sequential, which would run the block as a layer."""
    module = place.module
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"no block can go {place}: hooks do not run in a scripted module")
    if type(module).forward is nn.Sequential.forward:
        if len(module._modules) == 0:
            raise ValueError(f"no block can go {place}: it is empty")
        key = list(module._modules)[0 if place.side == "before" else -1]
        child = _Place(place.side, _joined(place.name, key), module.get_submodule(key))
        uses = sum(other is child.module for m in model.modules() for other in m._modules.values())
        if uses > 1:
            raise ValueError(f"no block can go {place}: its child {key!r} is used in {uses} places")
        return _descended(model, child)
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        children = shortened([_joined(place.name, key) for key in module._modules], 8)
        raise ValueError(f"no block can go {place}: it iterates over its children; choose one of {children}")
    return place


def _check_free(places: list[_Place]) -> None:
    if not places:
        raise ValueError("no place was given: pass before= or after= with the dotted name of a module")
    sides = [(place.module, place.side) for place in places]
    for place in places:
        if sides.count((place.module, place.side)) > 1 or hasattr(place.module, f"polynl_{place.side}"):
            raise ValueError(f"there is already a block {place}; polynl.remove(model) removes all blocks")


def _joined(parent: str, child: str) -> str:
    return f"{parent}.{child}".removeprefix(".")


# Finding the channel counts


def _run_watched(model: nn.Module, places: list[_Place], example: Any) -> None:
    """Run one forward pass that fills `seen` of every place; raise an error where no block can go."""
    args: tuple[Any, ...] = ()
    cause = None
    try:
        with ExitStack() as hooks, at_rest(model), torch.no_grad():
            for place in places:
                hooks.enter_context(place.module.register_forward_hook(place.watch, with_kwargs=True))
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
            f"{type(cause).__name__}: {cause}\nPass example= (an input of the model) or channels="
        ) from cause
    if missed:
        raise ValueError(f"no block can go {missed}: the model's forward pass does not call it")
    spatial = next((arg.shape[2:] for arg in args if isinstance(arg, Tensor)), torch.Size())
    for place in places:
        for value in place.seen:
            _check_feature_map(place, value, spatial)


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
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if first is None:
        raise ValueError(f"{type(model).__name__} has no convolution to guess an input from")
    rank = len(first.kernel_size)
    cfg = getattr(model, "pretrained_cfg", None)
    known = cfg.get("input_size") if isinstance(cfg, Mapping) else None
    size = known[1:] if known is not None and len(known) == rank + 1 else GUESSED_SIZES[rank]
    return torch.zeros((1, first.in_channels, *size), **_home(first, model))


def _home(*modules: nn.Module) -> dict[str, Any]:
    """Device and dtype of the first floating-point parameter in the first module that has one."""
    parameters = (p for module in modules for p in module.parameters() if p.is_floating_point())
    return next(({"device": p.device, "dtype": p.dtype} for p in parameters), {})


def _described(value: Any) -> torch.Size | str:
    if isinstance(value, Tensor):
        return value.shape
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def _check_feature_map(place: _Place, value: torch.Size | str, spatial: torch.Size) -> None:
    if isinstance(value, str) or len(value) < 3:
        problem = f"got {value}" if isinstance(value, str) else f"got a tensor of shape {tuple(value)}"
    elif _looks_channels_last(value, spatial):
        problem = f"and the channels of {tuple(value)} seem to come last; if they do not, pass channels="
    else:
        return
    raise ValueError(f"no block can go {place}: it needs one tensor (b, c, *spatial), {problem}")


def _looks_channels_last(shape: torch.Size, spatial: torch.Size) -> bool:
    """Tokens (b, n, c) of an image, or a map that keeps the input's proportions one axis too early."""
    if len(spatial) < 2 or len(shape) != len(spatial) + 2:
        return len(spatial) > 1 and len(shape) == 3
    return proportional(shape[-3:-1], spatial[-2:]) and not proportional(shape[-2:], spatial[-2:])


def proportional(sizes: Sequence[int], spatial: Sequence[int]) -> bool:
    """Whether a map of this height and width can come from such an image: strides keep the proportions."""
    # Strides round each size by up to one, which changes the cross product by up to the sum of both.
    return abs(sizes[0] * spatial[1] - sizes[1] * spatial[0]) <= sum(spatial)
