"""Replace the attention of a transformer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from polynl.blocks.poly_sa import PolySA
from polynl.errors import near_matches, shortened
from polynl.insertion.places import check_model, home

Model = TypeVar("Model", bound=nn.Module)
ATTENTION = {"poly_sa": PolySA}
# What timm has in the place of a part that an attention does without.
Absent = nn.Identity | None


def replace_attention(
    model: Model,
    attention: str,
    *,
    names: str | Sequence[str] | None = None,
    grid: Sequence[int] | None = None,
    prefix_tokens: int | None = None,
) -> Model:
    """Replace timm's `Attention` in all blocks of a ViT, or at one or several `names`; return the model.

    `attention` is "poly_sa", see `PolySA`. The projections keep their values and names, but the network has
    to be trained further. `grid`, the height and width in patches, and `prefix_tokens` default to the
    model's own. If there is an error, the model is left unchanged.
    """
    check_model(model)
    if attention not in ATTENTION:
        hint = near_matches(attention, ATTENTION)
        raise ValueError(f"attention={attention!r}: expected one of {', '.join(ATTENTION)}.{hint}")
    if names is None:
        found = _attentions(model)
    else:
        found = {name: _named(model, name) for name in ([names] if isinstance(names, str) else names)}
    if not found:
        why = f"{type(model).__name__} has no" if names is None else "names is empty: name an"
        raise ValueError(f"{why} Attention of timm to replace")
    host: Any = model
    if grid is None:
        grid = getattr(getattr(host, "patch_embed", None), "grid_size", None)
    if grid is None:
        raise ValueError(
            f"{type(model).__name__} does not say its grid of patches: pass grid=(height, width)"
        )
    if prefix_tokens is None:
        prefix_tokens = getattr(host, "num_prefix_tokens", 0)
    new = {name: _poly_sa(name, module, grid, prefix_tokens) for name, module in found.items()}
    for name, module in new.items():
        model.set_submodule(name, module)
    return model


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    vit: Any = sys.modules.get("timm.models.vision_transformer")  # loaded if the model is timm's
    kind = () if vit is None else vit.Attention
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def _named(model: nn.Module, name: str) -> nn.Module:
    found = _attentions(model)
    if name not in found:
        there = shortened(list(found)) or "none"
        raise ValueError(f"{name!r} is not an Attention of timm in {type(model).__name__}; it has {there}")
    return found[name]


def _poly_sa(name: str, old: Any, grid: Sequence[int], prefix_tokens: int) -> PolySA:
    """Poly-SA with the projections of an attention."""
    channels = old.qkv.in_features
    widths = {channels, old.qkv.out_features // 3, old.proj.out_features}
    further = [part for part in ("gate", "norm") if not isinstance(getattr(old, part, None), Absent)]
    if len(widths) > 1 or further:
        has = f"a {further[0]}" if further else f"different widths {sorted(widths)}"
        raise ValueError(f"{name}: an attention with {has} cannot be replaced")
    new = PolySA(channels, num_heads=old.num_heads, grid=grid, prefix_tokens=prefix_tokens)
    new = new.to(**home(old)).train(old.training)
    for part in ("qkv", "q_norm", "k_norm", "proj", "proj_drop"):
        setattr(new, part, getattr(old, part))
    return new
