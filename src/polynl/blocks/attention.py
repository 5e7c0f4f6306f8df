"""Shared by the blocks of queries, keys and values."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from polynl.blocks.base import Block
from polynl.blocks.pointwise import PointwiseNorm
from polynl.functional.summary import Summary


class AttentionBlock(Block):
    """Z = X + norm(Y W_out), where Y weights the values of all positions by queries and keys."""

    adds_contributions = True
    out: PointwiseNorm
    residual: bool = True
    """Whether X is added, in blocks with this option."""

    @abstractmethod
    def queries_of(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """The queries of all positions."""

    @abstractmethod
    def keys_and_values(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b m e"], Float[Tensor, "b m"] | None]:
        """Keys, values and their weights; there are fewer than positions if the keys are sub-sampled."""

    @abstractmethod
    def summary_of(
        self, k: Float[Tensor, "b m d"], v: Float[Tensor, "b m e"], weights: Float[Tensor, "b m"] | None
    ) -> Summary:
        """What the attention needs of keys and values, and linear in the values."""

    @abstractmethod
    def attention(self, q: Float[Tensor, "b n d"], summary: Summary) -> Float[Tensor, "b n e"]:
        """Y, linear in the values; channels are head-major."""

    def scales(self) -> tuple[float, float]:
        """X is added, or it is not."""
        return float(self.residual), 1.0

    def keys_of(self, spatial: torch.Size) -> torch.Size:
        """The spatial shape of the keys."""
        return spatial

    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b m"] | None = None,
    ) -> Summary:
        k, v, weights = self.keys_and_values(x, spatial, weights)
        return self.summary_of(k, v if emphasis is None else v * emphasis.unsqueeze(-1), weights)

    def _branch(
        self, x: Float[Tensor, "b n c"], summary: Summary, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        return self.out(self.attention(self.queries_of(x), summary), weights)

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        y = self._branch(x, summary, weights)
        return x + y if self.residual else y
