"""The inserted blocks as a value that JSON can hold, and the way back into a model that was built anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from polynl.blocks.base import Block
from polynl.errors import near_matches, shortened
from polynl.insertion.descriptions import Description, description_of
from polynl.insertion.forward_pass import Fit
from polynl.insertion.hooks import HOOKS, Wiring, detach, is_attached, wiring_of
from polynl.insertion.inserting import Maker, Model, believed_layout, check_maker, inserted, put
from polynl.insertion.layouts import wanted
from polynl.insertion.places import check_free, check_model, places_of
from polynl.insertion.recognition import recognised

FORMAT = "polynl spec 1"
ENTRY = {"place": str, "side": str, "block": str, "channels": int, "options": dict}
# Where a block does not get a whole argument or output (b, c, *spatial).
OPTIONAL = {"item": str | int, "layout": str, "prefix_tokens": int, "grid": list}
KINDS: dict[str, Any] = {**ENTRY, **OPTIONAL}


def spec(model: nn.Module) -> dict[str, Any]:
    """What `restore` needs to insert the model's blocks again: a dict that `json.dumps` takes.

    It holds every block's place, side, name, channel count, options and layout, and no weights. The name of a
    block of your own is its import path, such as "my.module:MyBlock".

    >>> import torchvision
    >>> from polynl import insert
    >>> model = insert(torchvision.models.resnet18(), "conv", before="layer3.1", channels=256)
    >>> spec(model)["blocks"][0]["place"]
    'layer3.1'
    """
    check_model(model)
    entries = []
    for name, module in model.named_modules():
        for child in HOOKS:
            if is_attached(module, child):
                side = child.removeprefix("polynl_")
                try:
                    description = _description(module, child)
                except ValueError as error:
                    where = f'{side} "{name}" ({type(module).__name__})'
                    raise ValueError(f"the block {where} cannot be described: {error}") from None
                wiring = _described_wiring(wiring_of(module, child))
                entries.append({"place": name, "side": side, **description, **wiring})
    return {"format": FORMAT, "blocks": entries}


def _described_wiring(wiring: Wiring) -> Description:
    layout = wiring.layout
    entry: Description = {} if wiring.item is None else {"item": wiring.item}
    if layout.kind != "channels_first":
        entry["layout"] = layout.kind
    if layout.kind == "tokens":
        entry["prefix_tokens"] = layout.prefix_tokens
    return entry if layout.grid is None else {**entry, "grid": list(layout.grid)}


def _description(module: nn.Module, child: str) -> Description:
    block = module.get_submodule(child)
    if isinstance(block, Block):
        return description_of(block)
    made_by = vars(module).get(
        f"{child}_made_by", f"nothing is known of what made the {type(block).__name__}"
    )
    if isinstance(made_by, str):
        raise ValueError(made_by)
    return made_by


def restore(
    model: Model, source: Mapping[str, Any], *, blocks: Mapping[str, Callable[..., nn.Module]] | None = None
) -> Model:
    """Insert the blocks of a spec, or those whose keys are in a state dict, and return the model.

    The blocks are new: load their weights afterwards. Nothing is run; a block whose channels do not fit says
    so when the model runs. If there is an error, the model is left unchanged.

    A state dict shows everything about a `poly_nl`, `latent_gnn`, `polynomial` or `conv`, except its `init`
    and `form`, which do not change the values, the `window` of a `poly_nl`, and the `residual` of a `conv`.
    For any other block an error asks for the spec.

    `blocks` are those of your own, by the names that the spec has for them. A spec is never the reason to
    import anything.

    >>> import torchvision
    >>> from polynl import insert
    >>> model = insert(torchvision.models.resnet18(), "poly_nl", before="layer3.1", channels=256)
    >>> list(inserted(restore(torchvision.models.resnet18(), spec(model))))
    ['layer3.1.polynl_before']
    """
    check_model(model)
    entries = _entries(source)
    present = inserted(model)
    try:
        for entry in entries:
            _restore(model, entry, {} if blocks is None else blocks)
    except Exception:
        for name in [name for name in inserted(model) if name not in present]:
            parent, _, child = name.rpartition(".")
            detach(model.get_submodule(parent), child)
        raise
    return model


def _restore(model: nn.Module, entry: Description, blocks: Mapping[str, Callable[..., nn.Module]]) -> None:
    name, side, place = entry["block"], entry["side"], entry["place"]
    maker: Maker = blocks.get(name, name)
    try:
        if isinstance(maker, str) and ":" in maker:
            raise ValueError(
                f"{name!r} is not a block of polynl.{near_matches(name, blocks)} "
                f"Pass it as blocks={{{name!r}: {name.rpartition(':')[2]}}}"
            )
        check_maker(maker)
        places = places_of(model, side, place, entry.get("item"))
        check_free(places)
        form = wanted(entry.get("layout", "channels_first"), entry.get("prefix_tokens"), entry.get("grid"))
        layout = believed_layout(model, places[0], form)
        put(model, maker, places, [Fit(entry["channels"], layout)], entry["options"])
    except (TypeError, ValueError) as error:
        raise ValueError(f'the block {side} "{place}" cannot be restored: {error}') from error


def _entries(source: Mapping[str, Any]) -> list[Description]:
    if not isinstance(source, Mapping):
        raise TypeError(f"expected a spec or a state dict, which are mappings, got {source!r}")
    if isinstance(source.get("format"), str):
        return _checked(source)
    if source and not any(isinstance(value, Tensor) for value in source.values()):
        keys = shortened([repr(key) for key in source])
        raise ValueError(
            f"neither a spec nor a state dict: its keys are {keys}, and none holds a tensor; "
            "if the state dict is inside, pass that"
        )
    return recognised(source)


def _checked(spec: Mapping[str, Any]) -> list[Description]:
    if spec["format"] != FORMAT:
        raise ValueError(f"unknown format {spec['format']!r}: this version of polynl reads {FORMAT!r}")
    entries = spec.get("blocks")
    if not isinstance(entries, list):
        raise ValueError(f"the spec has blocks={entries!r}: expected a list")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.keys() - OPTIONAL.keys() != ENTRY.keys():
            raise ValueError(f"block {i} of the spec is {entry!r}: expected a dict of {', '.join(ENTRY)}")
        for key, value in entry.items():
            if not isinstance(value, KINDS[key]):
                expected = getattr(KINDS[key], "__name__", KINDS[key])
                raise ValueError(f"block {i} of the spec: {key}={value!r}: expected {expected}")
        if f"polynl_{entry['side']}" not in HOOKS:
            raise ValueError(f"block {i} of the spec: side={entry['side']!r}: expected 'before' or 'after'")
    return entries
