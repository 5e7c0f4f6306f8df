"""The blocks: parameters, initial values and layout around the formulas of `polynl.functional`."""

from polynl.blocks.base import Block
from polynl.blocks.conv import ConvBaseline
from polynl.blocks.efficient import EfficientNL
from polynl.blocks.latent_gnn import LatentGNN
from polynl.blocks.non_local import NonLocal
from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.polynomial import PolynomialLayer
from polynl.blocks.registry import BLOCKS, build_block
from polynl.blocks.tesa import TESA

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
    "build_block",
]
