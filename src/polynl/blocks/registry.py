"""The blocks by name."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from polynl.blocks.base import Block
from polynl.blocks.conv import ConvBaseline
from polynl.blocks.efficient import EfficientNL
from polynl.blocks.latent_gnn import LatentGNN
from polynl.blocks.non_local import NonLocal
from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.polynomial import PolynomialLayer
from polynl.blocks.tesa import TESA

BLOCKS: dict[str, type[Block]] = {
    "poly_nl": PolyNL,
    "non_local": NonLocal,
    "efficient_nl": EfficientNL,
    "latent_gnn": LatentGNN,
    "tesa": TESA,
    "conv": ConvBaseline,
    "polynomial": PolynomialLayer,
}


def build_block(name: str, channels: int, **options: Any) -> Block:
    """The block called `name` in :data:`BLOCKS`.

    >>> build_block("non_local", 64, mode="gaussian").channels
    64
    """
    if not isinstance(name, str) or name not in BLOCKS:
        raise ValueError(
            f"no block is called {name!r}{_hint(name, BLOCKS)}; the blocks are {', '.join(BLOCKS)}"
        )
    check_options(name, options)
    return BLOCKS[name](channels, **options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise a TypeError that names the nearest option, where the block has none of that name."""
    known = list(inspect.signature(BLOCKS[name]).parameters)[1:]
    for option, value in options.items():
        if option not in known:
            raise TypeError(
                f"{name} has no option {option!r} (given as {value!r}){_hint(option, known)}; "
                f"its options are {', '.join(known)}"
            )


def _hint(word: str, known: Any) -> str:
    near = difflib.get_close_matches(str(word), known, n=1)
    return f", perhaps {near[0]!r} is meant" if near else ""
