"""The blocks by name: one row holds all that the rest of polynl needs to know about a block."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from polynl.blocks.base import Block, options_of
from polynl.blocks.conv import ConvBaseline
from polynl.blocks.efficient import EfficientNL
from polynl.blocks.global_context import GlobalContext
from polynl.blocks.grn import GlobalResponseNorm
from polynl.blocks.hydra import HydraAttention
from polynl.blocks.latent_gnn import LatentGNN
from polynl.blocks.non_local import NonLocal
from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.polynomial import PolynomialLayer
from polynl.blocks.relu_linear import ReLULinearAttention
from polynl.blocks.se import SqueezeExcite
from polynl.blocks.separable import SeparableAttention
from polynl.blocks.tesa import TESA
from polynl.blocks.xca import XCA
from polynl.errors import near_matches

Line = Literal["-", "--", "-.", ":"]
Family = Literal["non-local", "linear attention", "gate", "polynomial", "local"]
# How figures with many curves group them: layers that see only one position and its neighbours are one group.
FAMILY_TITLES: dict[Family, str] = {
    "non-local": "Non-local blocks",
    "linear attention": "Linear attention",
    "gate": "Gates",
    "polynomial": "Local layers",
    "local": "Local layers",
}

# Okabe and Ito's colours, which colour-blind readers tell apart; yellow is too pale for lines on white.
BLACK, GREY, ORANGE, SKY = "#000000", "#8c8c8c", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILLION, PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"


class Style(NamedTuple):
    """How figures draw a block, with matplotlib's names for markers and lines."""

    colour: str
    marker: str
    line: Line = "-"


@dataclass(frozen=True)
class BlockEntry:
    """A row of the registry."""

    block: type[Block]
    label: str
    """Name in tables and figures."""
    style: Style
    family: Family
    """What a position sees: all others, in the paper's way or in that of later linear attention; one vector
    of the map, the same for all (gates); only itself, in higher order; or its neighbours."""
    cost: str
    """Multiply-adds of its products for one large map of N = H·W positions and C ≥ 128 channels, with the
    default options. What is done element by element is not counted."""
    in_paper: bool = False
    """Whether the paper compares it; `polynl reproduce` trains these."""


# A network without a block: its name in recipes, its label and its style.
NO_BLOCK, NO_BLOCK_LABEL, NO_BLOCK_STYLE = "none", "no block", Style(BLACK, "o")

# In the paper's order, which tables keep. Lines of figures show the family: gates are dotted, linear
# attention is dash-dotted.
BLOCKS: dict[str, BlockEntry] = {
    "non_local": BlockEntry(
        NonLocal, "Non-local", Style(BLUE, "^"), "non-local", "2NC² + 3C³", in_paper=True
    ),
    "tesa": BlockEntry(
        TESA, "TESA", Style(PURPLE, "h", "--"), "non-local", "6NC² + 2NC(H + W)", in_paper=True
    ),
    "latent_gnn": BlockEntry(
        LatentGNN, "Latent-GNN", Style(ORANGE, "X"), "non-local", "0.75NC² + 100NC + 5000C", in_paper=True
    ),
    "efficient_nl": BlockEntry(
        EfficientNL, "Efficient-NL", Style(GREEN, "D"), "non-local", "2.5NC²", in_paper=True
    ),
    "poly_nl": BlockEntry(PolyNL, "Poly-NL", Style(VERMILLION, "*"), "non-local", "2NC² + C³", in_paper=True),
    "xca": BlockEntry(XCA, "XCA", Style(BLUE, "s", "-."), "linear attention", "2NC² + 5C³"),
    "relu_linear": BlockEntry(
        ReLULinearAttention, "ReLU-linear", Style(ORANGE, "v", "-."), "linear attention", "6NC² + NC"
    ),
    "separable": BlockEntry(
        SeparableAttention, "Separable", Style(SKY, "P", "-."), "linear attention", "3NC² + 2NC"
    ),
    "hydra": BlockEntry(HydraAttention, "Hydra", Style(PURPLE, "^", "-."), "linear attention", "4NC²"),
    "se": BlockEntry(SqueezeExcite, "SE", Style(SKY, "o", ":"), "gate", "0.125C²"),
    "global_context": BlockEntry(GlobalContext, "GCNet", Style(GREEN, "p", ":"), "gate", "2NC + 0.25C²"),
    "grn": BlockEntry(GlobalResponseNorm, "GRN", Style(ORANGE, "D", ":"), "gate", "0"),
    "polynomial": BlockEntry(PolynomialLayer, "Polynomial", Style(GREY, "d", "-."), "polynomial", "4NC²"),
    "conv": BlockEntry(ConvBaseline, "Convolution", Style(BLACK, "s", "--"), "local", "NC²"),
}
"""All blocks by the name that `insert`, `build_block`, recipes and the command line use."""


def build_block(name: str, channels: int, **options: Any) -> Block:
    """The block called `name` in :data:`BLOCKS`.

    >>> build_block("non_local", 64, mode="gaussian").channels
    64
    """
    if not isinstance(name, str) or name not in BLOCKS:
        hint = near_matches(str(name), BLOCKS)
        raise ValueError(f"there is no block {name!r}.{hint} The blocks are {', '.join(BLOCKS)}.")
    check_options(name, options)
    return BLOCKS[name].block(channels, **options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise a TypeError that names the nearest options, if the block does not have one of `options`."""
    check_known(name, options, options_of(BLOCKS[name].block))


def check_known(owner: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise a TypeError that names the nearest of the known options, if one of `options` is not known."""
    for option, value in options.items():
        if option not in known:
            hint = near_matches(option, known)
            raise TypeError(
                f"{owner} has no option {option!r} (given as {value!r}).{hint} "
                f"Its options are {', '.join(known)}."
            )
