"""Blocks as lines of ultralytics' model files, such as `- [-1, 1, PolyNL, [{reduction: 2}]]`.

Import it before a model is built. ultralytics passes the channels of the layer before only to layers that it
knows. So it builds one of these, a BatchNorm2d, at the place of a block, and the block replaces it: it fits
whatever the model's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import ultralytics.nn.tasks as tasks
from torch import nn

from polynl.blocks.base import Block
from polynl.blocks.registry import BLOCKS

CLASSES = {row.block.__name__: row.block for row in BLOCKS.values()}
STAND_IN = "nn.BatchNorm2d"
_parse_layers = tasks.parse_model


def parse_model(d: dict[str, Any], ch: int, verbose: bool = True) -> tuple[nn.Sequential, list[int]]:
    """The layers of a model file and those whose output is kept, as ultralytics returns them, with blocks.

    Like ultralytics' own, it changes `d`, of which its models pass a copy.
    """
    found = {}
    for number, row in enumerate([*d["backbone"], *d["head"]]):
        if row[2] in CLASSES:
            found[number] = partial(CLASSES[row[2]], **_options(number, row))
            row[2:] = [STAND_IN, []]
    layers, kept = _parse_layers(d, ch, verbose)
    for number, block in found.items():
        layers[number] = _replaced(layers[number], block)
        if verbose:
            tasks.LOGGER.info(f"layer {number} is {layers[number]}")
    return layers, kept


def _options(number: int, row: list[Any]) -> Mapping[str, Any]:
    source, _, name, arguments = row
    if not isinstance(source, int):
        raise ValueError(f"layer {number}: {name} takes the output of one layer, got from={source!r}")
    if not arguments:
        return {}
    if len(arguments) != 1 or not isinstance(arguments[0], dict):
        raise ValueError(
            f"layer {number}: {name} has the arguments {arguments!r}: expected [] or [{{option: value}}], "
            "without channels"
        )
    return arguments[0]


def _replaced(stand_in: Any, block: partial[Block]) -> nn.Module:
    """The block, or as many in a row, with what ultralytics has noted about the layer."""
    several = isinstance(stand_in, nn.Sequential)
    blocks = [block(norm.num_features) for norm in (stand_in if several else [stand_in])]
    layer: Any = nn.Sequential(*blocks) if several else blocks[0]
    layer.i, layer.f = stand_in.i, stand_in.f
    layer.type = f"{type(blocks[0]).__module__}.{type(blocks[0]).__name__}"
    layer.np = sum(parameter.numel() for parameter in layer.parameters())
    return layer


tasks.parse_model = parse_model
