"""Layers on folded maps: the same linear map at every position, and norms after it."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.functional.gram import project

Norm = Literal["none", "batch", "layer"]


class Pointwise(nn.Linear):
    """A 1×1 convolution of any rank."""

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """See :func:`polynl.functional.project`."""
        return project(x, self.weight, self.bias)


class PointwiseNorm(nn.Module):
    """`Pointwise` followed by a norm."""

    def __init__(self, channels: int, out_channels: int, *, bias: bool, norm: Norm, **factory: Any) -> None:
        super().__init__()
        self.linear = Pointwise(channels, out_channels, bias=bias, **factory)
        self.norm: nn.Module | None = None
        if norm == "batch":
            self.norm = nn.BatchNorm1d(out_channels, **factory)
        elif norm == "layer":
            self.norm = nn.GroupNorm(1, out_channels, affine=False)

    def forward(
        self, x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """The normalised projection; statistics over positions do not include those of weight 0."""
        y = self.linear(x)
        if self.norm is None:
            return y
        if weights is None or not self._over_positions():
            # Compiled graphs assume that a norm's output is contiguous and fail on any other layout.
            return self.norm(y.mT.contiguous()).mT
        if isinstance(self.norm, nn.GroupNorm):
            return _masked_layer_norm(y, weights, self.norm.eps)
        counted = weights > 0
        return torch.zeros_like(y).masked_scatter(counted.unsqueeze(-1), self.norm(y[counted]))

    def _over_positions(self) -> bool:
        """Whether the norm computes statistics now, rather than use those of training."""
        norm: Any = self.norm
        return isinstance(norm, nn.GroupNorm) or norm.training or norm.running_var is None

    def zero(self) -> None:
        """Make the output zero with as few parameters as possible: the norm's scale, or else the weight."""
        layer = self.norm if isinstance(self.norm, nn.BatchNorm1d) else self.linear
        nn.init.zeros_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _masked_layer_norm(
    x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"], eps: float
) -> Float[Tensor, "b n c"]:
    """X minus its mean, over its standard deviation; both over channels and weighted positions."""
    weights = (weights / weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)).unsqueeze(-1)
    # Filled, because the square of what a position of weight 0 holds may overflow, and 0 · ∞ is NaN.
    kept = x.masked_fill(weights == 0, 0)
    mean = (weights * kept).sum(dim=1).mean(dim=-1)[:, None, None]
    variance = (weights * (kept - mean).square()).sum(dim=1).mean(dim=-1)[:, None, None]
    return (x - mean) / (variance + eps).sqrt()
