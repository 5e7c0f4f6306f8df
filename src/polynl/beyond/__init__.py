"""Maps larger than one memory: images in tiles, streams of frames, shards on several processes."""

from polynl.beyond.shards import shard, unshard
from polynl.beyond.streams import Stream
from polynl.beyond.tiles import NotTiledError, TilePlan, plan_tiles, run_tiled

__all__ = ["NotTiledError", "Stream", "TilePlan", "plan_tiles", "run_tiled", "shard", "unshard"]
