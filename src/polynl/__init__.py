"""Non-local layers for vision networks at the cost of a convolution."""

TYPE_CHECKING = False  # as type checkers know it; to import `typing` takes as long as Python's start
if TYPE_CHECKING:
    from polynl.beyond import NotTiledError, Stream, TilePlan, plan_tiles, run_tiled, shard, unshard
    from polynl.blocks import (
        BLOCKS,
        TESA,
        XCA,
        Block,
        ConvBaseline,
        EfficientNL,
        GlobalContext,
        GlobalResponseNorm,
        HydraAttention,
        LatentGNN,
        NonLocal,
        PolyNL,
        PolynomialLayer,
        PolySA,
        ReLULinearAttention,
        SeparableAttention,
        SqueezeExcite,
        build_block,
    )
    from polynl.blocks.peers import load_peer
    from polynl.functional.summary import Summary
    from polynl.insertion import ignore_padding, insert, inserted, remove, replace_attention, restore, spec
    from polynl.sharing import from_pretrained, load_run
else:

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used: the command `polynl` starts before torch is loaded."""
        import importlib

        if name in ("beyond", "blocks", "export", "functional", "insertion", "sharing"):
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
    "XCA",
    "Block",
    "ConvBaseline",
    "EfficientNL",
    "GlobalContext",
    "GlobalResponseNorm",
    "HydraAttention",
    "LatentGNN",
    "NonLocal",
    "NotTiledError",
    "PolyNL",
    "PolySA",
    "PolynomialLayer",
    "ReLULinearAttention",
    "SeparableAttention",
    "SqueezeExcite",
    "Stream",
    "Summary",
    "TilePlan",
    "build_block",
    "from_pretrained",
    "ignore_padding",
    "insert",
    "inserted",
    "load_peer",
    "load_run",
    "plan_tiles",
    "remove",
    "replace_attention",
    "restore",
    "run_tiled",
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
    "polynl.sharing",
)
