"""Non-local layers for vision networks at the cost of a convolution."""

TYPE_CHECKING = False  # as type checkers know it; to import `typing` takes as long as Python's start
if TYPE_CHECKING:
    from polynl.beyond import Stream, shard, unshard
    from polynl.blocks import (
        BLOCKS,
        TESA,
        Block,
        ConvBaseline,
        EfficientNL,
        LatentGNN,
        NonLocal,
        PolyNL,
        PolynomialLayer,
        build_block,
    )
    from polynl.blocks.peers import load_peer
    from polynl.functional.summary import Summary
    from polynl.insertion import insert, inserted, remove, restore, spec
else:

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used: the command `polynl` starts before torch is loaded."""
        import importlib

        if name in ("beyond", "blocks", "functional", "insertion"):
            return importlib.import_module(f"polynl.{name}")
        if name in __all__:
            for module in map(importlib.import_module, _HOMES):
                if hasattr(module, name):
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module 'polynl' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "BLOCKS",
    "TESA",
    "Block",
    "ConvBaseline",
    "EfficientNL",
    "LatentGNN",
    "NonLocal",
    "PolyNL",
    "PolynomialLayer",
    "Stream",
    "Summary",
    "build_block",
    "insert",
    "inserted",
    "load_peer",
    "remove",
    "restore",
    "shard",
    "spec",
    "unshard",
]
_HOMES = (
    "polynl.blocks",
    "polynl.blocks.peers",
    "polynl.functional.summary",
    "polynl.insertion",
    "polynl.beyond",
)
