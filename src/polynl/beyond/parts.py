"""The blocks of a model whose inputs are parts of a map."""

from __future__ import annotations

from torch import nn

from polynl.blocks.base import Block, LocalBlock


def blocks_of(model: nn.Module) -> dict[str, Block]:
    """The blocks in which positions see each other, by name; a ValueError if one cannot work in parts."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    blocks = {name or "model": module for name, module in model.named_modules() if isinstance(module, Block)}
    if not blocks:
        raise ValueError(f"{type(model).__name__} contains no block of polynl: insert one with polynl.insert")
    for name, block in blocks.items():
        if problem := block.why_not_in_parts():
            kind = type(block).__name__
            raise ValueError(f"{name}, a {kind}, cannot be computed in parts: {problem}")
    return {name: block for name, block in blocks.items() if not isinstance(block, LocalBlock)}
