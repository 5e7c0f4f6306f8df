"""All blocks with the first arguments of MONAI's: `PolyNL(spatial_dims, in_channels, …)`."""

from __future__ import annotations

from typing import Any

from polynl.blocks.base import Block, options_of
from polynl.integrations.adapters import Build, adapters


def _build(block: type[Block]) -> Build:
    def build(spatial_dims: int, in_channels: int, **options: Any) -> Block:
        if spatial_dims not in (1, 2, 3):
            raise ValueError(f"spatial_dims={spatial_dims!r}: expected 1, 2 or 3")
        # Most blocks take maps of any number of axes; the others have an option for it.
        if "spatial_axes" in options_of(block):
            options = {"spatial_axes": spatial_dims, **options}
        return block(in_channels, **options)

    return build


_ADAPTERS = adapters(_build)
__all__ = sorted(_ADAPTERS)


def __getattr__(name: str) -> Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _ADAPTERS[name]
