"""Scores over what all processes have found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from polynl.errors import RunStoppedError

Share = TypeVar("Share")


def scored_together(share: Share, score: Callable[[list[Share]], dict[str, float]]) -> dict[str, float]:
    """`score` of the shares of all processes: the first one computes it, and all get it."""
    if not dist.is_initialized():
        return score([share])
    first = dist.get_rank() == 0
    shares: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(share, shares)
    scores: list[Any] = [None]
    try:
        if shares is not None:
            scores = [score(shares)]
    finally:
        # Also when it fails: the others wait for it.
        dist.broadcast_object_list(scores, src=0)
    if scores[0] is None:
        raise RunStoppedError("the first process could not score what was found.")
    return cast(dict[str, float], scores[0])
