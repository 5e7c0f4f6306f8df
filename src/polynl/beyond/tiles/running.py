"""Run a network on a tile, with the calls that need the whole map answered from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polynl.beyond.tiles.calls import Axis, Call, calls
from polynl.beyond.tiles.grid import Tile
from polynl.beyond.tiles.sites import NotTiledError, Site

Answer = Callable[[Site, Call, Sequence[Axis]], Tensor]


def run_on_tile(model: nn.Module, x: Tensor, sites: Sequence[Site], tile: Tile, answer: Answer) -> Any:
    """The model's output; `answer` gives the results of calls that need the whole map.

    It gets the site, the call, and where the tile lies in the call's map.
    """
    waiting = iter(sites)

    def handle(call: Call, as_it_is: Callable[[], Any]) -> Any:
        site = next(waiting, None)
        if site is None or type(site.call) is not type(call):
            raise NotTiledError(f"the network computes other things in the tile of {tile} than in others")
        return answer(site, call, site.axes(tile)) if site.needs_whole() else as_it_is()

    with torch.no_grad(), calls(model, handle):
        return model(x)
