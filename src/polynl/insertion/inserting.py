"""Insert blocks, list them and remove them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from polynl.blocks.base import Block
from polynl.blocks.registry import build_block
from polynl.insertion.descriptions import description_of_call
from polynl.insertion.forward_pass import widths_of
from polynl.insertion.hooks import HOOKS, attach, detach, is_attached
from polynl.insertion.places import Names, Place, check_free, check_model, home, joined, places_of

Model = TypeVar("Model", bound=nn.Module)
Maker = str | Callable[..., nn.Module]


def insert(
    model: Model,
    block: Maker,
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
    that pass is `example`, one argument or a tuple of several (default: guessed from the first convolution
    with 1 to 4 input channels). If there is an error, the model is left unchanged.

    >>> import torchvision
    >>> model = insert(torchvision.models.resnet18(), "poly_nl", before="layer3.1", reduction=2)
    >>> model.layer3[1].polynl_before.channels
    256
    """
    check_model(model)
    check_maker(block)
    if channels is not None and example is not None:
        raise ValueError("give channels or example, not both: the example is only used to find the channels")
    places = [*places_of(model, "before", before), *places_of(model, "after", after)]
    if not places:
        raise ValueError("no place was given: pass before= or after= with the dotted name of a module")
    check_free(places)
    widths = widths_of(model, places, example) if channels is None else [channels] * len(places)
    put(model, block, places, widths, options)
    return model


def check_maker(block: object) -> None:
    """Raise a TypeError unless this is something that makes blocks."""
    if isinstance(block, nn.Module) or not (isinstance(block, str) or callable(block)):
        raise TypeError(f"block must be a name, a block class or a callable that makes blocks, got {block!r}")


def put(
    model: nn.Module,
    block: Maker,
    places: Sequence[Place],
    widths: Sequence[int],
    options: Mapping[str, Any],
) -> None:
    """Build a block of each width and attach it, or do nothing if one cannot be built."""
    blocks = [
        _built(block, width, options).to(**home(place.module, model)).train(place.module.training)
        for place, width in zip(places, widths, strict=True)
    ]
    for place, width, new in zip(places, widths, blocks, strict=True):
        attach(place.module, place.side, new)
        if not isinstance(new, Block) and not isinstance(block, str):
            made_by = description_of_call(block, width, options)
            setattr(place.module, f"polynl_{place.side}_made_by", made_by)


def _built(block: Maker, channels: int, options: Mapping[str, Any]) -> nn.Module:
    new = build_block(block, channels, **options) if isinstance(block, str) else block(channels, **options)
    if not isinstance(new, nn.Module):
        raise TypeError(f"block must make an nn.Module from the channel count, got {new!r}")
    return new


def remove(model: Model) -> Model:
    """Remove every block that `insert` put into the model, if any, and return the model."""
    check_model(model)
    for module in list(model.modules()):
        for child in HOOKS:
            if is_attached(module, child):
                detach(module, child)
    return model


def inserted(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that `insert` put into the model, by dotted name such as "layer3.5.polynl_before"."""
    check_model(model)
    return {
        joined(name, child): module.get_submodule(child)
        for name, module in model.named_modules()
        for child in HOOKS
        if is_attached(module, child)
    }
