"""The blocks by name: one row holds all that the rest of polynl needs to know about a block."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from polynl.blocks.base import Block, options_of
from polynl.blocks.conv import ConvBaseline
from polynl.blocks.efficient import EfficientNL
from polynl.blocks.latent_gnn import LatentGNN
from polynl.blocks.non_local import NonLocal
from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.polynomial import PolynomialLayer
from polynl.blocks.tesa import TESA
from polynl.errors import near_matches

Line = Literal["-", "--", "-.", ":"]
Family = Literal["non-local", "polynomial", "local"]

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
    """Whether a position sees all others, only itself (in higher order), or its neighbours."""
    in_paper: bool = False
    """Whether the paper compares it; `polynl reproduce` trains these."""


# A network without a block: its name in recipes, its label and its style.
NO_BLOCK, NO_BLOCK_LABEL, NO_BLOCK_STYLE = "none", "no block", Style(BLACK, "o")

# In the paper's order, which tables keep.
BLOCKS: dict[str, BlockEntry] = {
    "non_local": BlockEntry(NonLocal, "Non-local", Style(BLUE, "^"), "non-local", in_paper=True),
    "tesa": BlockEntry(TESA, "TESA", Style(PURPLE, "h", "--"), "non-local", in_paper=True),
    "latent_gnn": BlockEntry(LatentGNN, "Latent-GNN", Style(ORANGE, "X"), "non-local", in_paper=True),
    "efficient_nl": BlockEntry(EfficientNL, "Efficient-NL", Style(GREEN, "D"), "non-local", in_paper=True),
    "poly_nl": BlockEntry(PolyNL, "Poly-NL", Style(VERMILLION, "*"), "non-local", in_paper=True),
    "polynomial": BlockEntry(PolynomialLayer, "Polynomial", Style(GREY, "d", "-."), "polynomial"),
    "conv": BlockEntry(ConvBaseline, "Convolution", Style(BLACK, "s", "--"), "local"),
}


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
