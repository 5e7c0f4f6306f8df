"""Images larger than memory: a network on tiles, with the result of the whole image."""

from polynl.beyond.tiles.plan import TilePlan
from polynl.beyond.tiles.run import plan_tiles, run_tiled
from polynl.beyond.tiles.sites import NotTiledError

__all__ = ["NotTiledError", "TilePlan", "plan_tiles", "run_tiled"]
