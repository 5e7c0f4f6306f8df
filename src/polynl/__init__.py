"""Non-local layers for vision networks at the cost of a convolution."""

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
from polynl.insertion import insert, inserted, remove

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
    "Summary",
    "build_block",
    "insert",
    "inserted",
    "load_peer",
    "remove",
]
