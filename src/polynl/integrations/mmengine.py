"""Registers all blocks in mmengine's MODELS, by the names of their classes.

A config imports it with `custom_imports = dict(imports=["polynl.integrations.mmengine"])`, and then has
`dict(type="PolyNL", in_channels=256)`.
"""

from __future__ import annotations

from typing import Any

from mmengine.registry import MODELS

from polynl.blocks.base import Block
from polynl.integrations.adapters import Build, adapters


def _build(block: type[Block]) -> Build:
    def build(in_channels: int | None = None, *, channels: int | None = None, **options: Any) -> Block:
        if (in_channels is None) == (channels is None):
            raise TypeError(f"{block.__name__} needs in_channels or channels, one of them")
        return block(in_channels if channels is None else channels, **options)  # type: ignore[arg-type]

    return build


for _name, _class in adapters(_build).items():
    MODELS.register_module(name=_name, module=_class)
