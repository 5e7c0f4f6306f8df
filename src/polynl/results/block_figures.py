"""What a block does in a network, epoch by epoch: its α and β, and the share of its branch in its output.

They are columns of a run's metrics, such as "layer3.5.share" for the block before layer3.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# The figures of a block, with the titles of their charts and of their axes. A block's last matrix decides
# with which sign it learns β: over seeds, only the size has a mean that says something.
FIGURES = {
    "share": ("Share of the branch, ‖βY‖ ÷ ‖Z‖", "share"),
    "alpha": ("α", "learned α"),
    "beta": ("|β|", "size of the learned β"),
}
# Below it a block changes less than the noise of training does.
IDLE = 1e-3


def block_columns(rows: Sequence[Mapping[str, Any]], figure: str) -> dict[str, str]:
    """The column of a figure for every block, by the block's name."""
    ending = f".{figure}"
    names = dict.fromkeys(name for row in rows for name in row if name.endswith(ending))
    return {name.removesuffix(ending): name for name in names}


def idle_blocks(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest share of every block whose share stayed below a thousandth."""
    found = {}
    for block, column in block_columns(rows, "share").items():
        shares = [row[column] for row in rows if isinstance(row.get(column), int | float)]
        largest = max(filter(math.isfinite, shares), default=IDLE)
        if largest < IDLE:
            found[block] = largest
    return found


def idle_sentence(block: str, largest: float) -> str:
    """That a block does nothing, and what to do."""
    return (
        f"The block at {block} hardly does anything: its branch is at most {largest:.1g} of its output. A "
        "higher optimizer.block_lr_scale, a longer training or the block's option init=random lets it learn "
        "more."
    )
