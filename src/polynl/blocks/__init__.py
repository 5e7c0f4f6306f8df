"""The blocks: parameters, initial values and layout around the formulas of `polynl.functional`."""

from polynl.blocks.base import Block
from polynl.blocks.conv import ConvBaseline
from polynl.blocks.efficient import EfficientNL
from polynl.blocks.global_context import GlobalContext
from polynl.blocks.grn import GlobalResponseNorm
from polynl.blocks.hydra import HydraAttention
from polynl.blocks.latent_gnn import LatentGNN
from polynl.blocks.non_local import NonLocal
from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.poly_sa import PolySA
from polynl.blocks.polynomial import PolynomialLayer
from polynl.blocks.registry import BLOCKS, build_block
from polynl.blocks.relu_linear import ReLULinearAttention
from polynl.blocks.se import SqueezeExcite
from polynl.blocks.separable import SeparableAttention
from polynl.blocks.tesa import TESA
from polynl.blocks.xca import XCA

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
    "PolyNL",
    "PolySA",
    "PolynomialLayer",
    "ReLULinearAttention",
    "SeparableAttention",
    "SqueezeExcite",
    "build_block",
]
