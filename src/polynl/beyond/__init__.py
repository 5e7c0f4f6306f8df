"""Maps larger than one memory: streams of frames, and shards on several processes."""

from polynl.beyond.shards import shard, unshard
from polynl.beyond.streams import Stream

__all__ = ["Stream", "shard", "unshard"]
