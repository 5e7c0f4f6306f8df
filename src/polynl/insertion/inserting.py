"""Insert blocks, list them and remove them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from polynl.blocks.base import Block
from polynl.blocks.registry import build_block
from polynl.insertion.descriptions import description_of_call
from polynl.insertion.forward_pass import Fit, fits_of
from polynl.insertion.hooks import HOOKS, Wiring, attach, detach, is_attached
from polynl.insertion.layouts import Layout, Wanted, wanted
from polynl.insertion.padding import heed_padding
from polynl.insertion.padding import ignore_padding as leave_padding_out
from polynl.insertion.places import (
    Names,
    Place,
    check_free,
    check_model,
    claimed_prefix,
    home,
    joined,
    places_of,
)
from polynl.insertion.selection import Item

Model = TypeVar("Model", bound=nn.Module)
Maker = str | Callable[..., nn.Module]


def insert(
    model: Model,
    block: Maker,
    *,
    before: Names = None,
    after: Names = None,
    argument: Item = None,
    output: Item = None,
    layout: str = "auto",
    prefix_tokens: int | None = None,
    grid: Sequence[int] | None = None,
    channels: int | None = None,
    example: Any = None,
    ignore_padding: bool = False,
    **options: Any,
) -> Model:
    """Put a new block on the input (`before`) or output (`after`) of every named module; return the model.

    `block` is a name in `polynl.BLOCKS`, a block class or any callable; it is called with the channel count
    and `options`. Modules are named as in `model.named_modules()`; "" is the model itself. At a plain
    `nn.Sequential`, the block goes to the outermost child.

    A block before a module gets the module's first argument, or the one that `argument` names or counts from
    0. A block after it gets the output, or the item `output` of a tuple or dict. A dot leads to an item
    inside: "features.0".

    `layout` is that of the tensor there: "channels_first" (b, c, *spatial), "channels_last"
    (b, *spatial, c), "tokens" (b, n, c), or "auto", found in the forward pass. Blocks leave out the first
    `prefix_tokens` tokens and get the others as a map of shape `grid`, such as (14, 14) (default: found).

    `channels` (default: found by one forward pass in eval mode) is the same for all places. If it is given,
    the model is not run, and the layout "auto" is "channels_first". The input of the pass is `example`, one
    argument or a tuple of several (default: guessed from the first convolution with 1 to 4 input channels).
    If there is an error, the model is left unchanged.

    `ignore_padding` is for detectors of torchvision: all blocks leave the padding of batches out of what they
    sum up. See :func:`polynl.ignore_padding`.

    >>> import torchvision
    >>> model = insert(torchvision.models.resnet18(), "poly_nl", before="layer3.1", reduction=2)
    >>> model.layer3[1].polynl_before.channels
    256
    """
    check_model(model)
    check_maker(block)
    if channels is not None and example is not None:
        raise ValueError("give channels or example, not both: the example is only used to find the channels")
    form = wanted(layout, prefix_tokens, grid)
    places = _places(model, before, after, argument, output)
    if channels is None:
        fits = fits_of(model, places, form, example)
    else:
        fits = [Fit(channels, believed_layout(model, place, form)) for place in places]
    put(model, block, places, fits, options)
    if ignore_padding:
        try:
            leave_padding_out(model)
        except ValueError:
            for place in places:
                detach(place.module, f"polynl_{place.side}")
            raise
    return model


def _places(model: nn.Module, before: Names, after: Names, argument: Item, output: Item) -> list[Place]:
    befores, afters = places_of(model, "before", before, argument), places_of(model, "after", after, output)
    if not befores and not afters:
        raise ValueError("no place was given: pass before= or after= with the dotted name of a module")
    for name, item, places in (("argument", argument, befores), ("output", output, afters)):
        if item is not None and not places:
            side = "before" if name == "argument" else "after"
            raise ValueError(f"{name}={item!r} is for blocks {side} a module: pass {side}=")
    check_free([*befores, *afters])
    return [*befores, *afters]


def believed_layout(model: nn.Module, place: Place, form: Wanted) -> Layout:
    """The layout without a look at the model's tensors."""
    if form.kind != "tokens":
        return Layout(form.kind or "channels_first")
    prefix = claimed_prefix(model, place) if form.prefix_tokens is None else form.prefix_tokens
    return Layout("tokens", prefix or 0, form.grid)


def check_maker(block: object) -> None:
    """Raise a TypeError unless this is something that makes blocks."""
    if isinstance(block, nn.Module) or not (isinstance(block, str) or callable(block)):
        raise TypeError(f"block must be a name, a block class or a callable that makes blocks, got {block!r}")


def put(
    model: nn.Module,
    block: Maker,
    places: Sequence[Place],
    fits: Sequence[Fit],
    options: Mapping[str, Any],
) -> None:
    """Build a block for each place and attach it, or do nothing if one cannot be built."""
    blocks = [
        _built(block, fit.channels, options).to(**home(place.module, model)).train(place.module.training)
        for place, fit in zip(places, fits, strict=True)
    ]
    for place, fit, new in zip(places, fits, blocks, strict=True):
        _check_grid(place, fit.layout, new)
    for place, fit, new in zip(places, fits, blocks, strict=True):
        attach(place.module, place.side, new, Wiring(place.selection, fit.layout, place.item))
        if not isinstance(new, Block) and not isinstance(block, str):
            made_by = description_of_call(block, fit.channels, options)
            setattr(place.module, f"polynl_{place.side}_made_by", made_by)


def _check_grid(place: Place, layout: Layout, block: nn.Module) -> None:
    if layout.kind == "tokens" and layout.grid is None and isinstance(block, Block) and block.uses_grid:
        raise ValueError(
            f"no grid is known for the tokens {place}, and {type(block).__name__} needs it: pass grid=, "
            "such as (14, 14)"
        )


def _built(block: Maker, channels: int, options: Mapping[str, Any]) -> nn.Module:
    new = build_block(block, channels, **options) if isinstance(block, str) else block(channels, **options)
    if not isinstance(new, nn.Module):
        raise TypeError(f"block must make an nn.Module from the channel count, got {new!r}")
    return new


def remove(model: Model) -> Model:
    """Remove every block that `insert` put into the model, if any, and return the model.

    What `ignore_padding` did to a detector is undone too.
    """
    check_model(model)
    heed_padding(model)
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
