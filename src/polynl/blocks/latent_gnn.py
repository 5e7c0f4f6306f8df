"""Latent-GNN (Zhang 2019) as a block."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Init, PointwiseNorm, choice, flag, sizes, width
from polynl.functional.latent_gnn import latent_gnn, unit_length

Mode = Literal["asymmetric", "symmetric"]


class LatentGNN(Block):
    """Z = X + γ·norm([Y₁, …, Y_K] W_out), one Y per kernel; `latent_dims` are the latent nodes of each.

    v and l are X projected to `inner_channels` (default: channels // 4), batch-normalised and scaled to unit
    length at each position; in `mode` "symmetric" they are the same. A kernel connects v to its nodes and the
    nodes to l: see :func:`polynl.functional.latent_gnn`. With `graph_conv`, its result goes through one more
    projection, norm and ReLU.

    As published, the branch grows with the map: as √N in asymmetric mode, as N in symmetric mode.

    Identity, as published: γ = 0. γ receives gradient at once, the rest after the first step.
    """

    def __init__(
        self,
        channels: int,
        *,
        latent_dims: int | Sequence[int] = 100,
        inner_channels: int | None = None,
        mode: Mode = "asymmetric",
        graph_conv: bool = False,
        init: Init = "identity",
    ) -> None:
        super().__init__(channels, init)
        nodes = "the number of latent nodes of one kernel, or of each of several"
        self.latent_dims = sizes("latent_dims", latent_dims, nodes)
        self.inner_channels = width("inner_channels", inner_channels, channels // 4)
        self.mode = choice("mode", mode, Mode)
        self.graph_conv = flag("graph_conv", graph_conv)
        inner, asymmetric = self.inner_channels, mode == "asymmetric"
        self.to_latent = _projection(channels, inner)
        self.from_latent = _projection(channels, inner) if asymmetric else None
        self.kernels = nn.ModuleList(
            LatentKernel(inner, d, asymmetric=asymmetric, graph_conv=graph_conv) for d in self.latent_dims
        )
        self.out = _projection(inner * len(self.latent_dims), channels)
        self.gamma = nn.Parameter(torch.zeros(()) if init == "identity" else torch.ones(()))

    def scales(self) -> tuple[Tensor | float, Tensor | float]:
        """1 and γ."""
        return 1.0, self.gamma

    def transform(self, x: Float[Tensor, "b n c"], spatial: torch.Size) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        v = unit_length(self.to_latent(x), dim=-1)
        l = v if self.from_latent is None else unit_length(self.from_latent(x), dim=-1)  # noqa: E741
        y = torch.cat([kernel(v, l) for kernel in self.kernels], dim=-1)
        return x + self.gamma * self.out(y)


class LatentKernel(nn.Module):
    """The parameters of one kernel, which connects positions to its latent nodes."""

    def __init__(self, channels: int, latent_dim: int, *, asymmetric: bool, graph_conv: bool) -> None:
        super().__init__()
        self.to_latent = _projection(channels, latent_dim)
        self.from_latent = _projection(channels, latent_dim) if asymmetric else None
        self.graph = _projection(channels, channels) if graph_conv else None

    def forward(self, v: Float[Tensor, "b n c"], l: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:  # noqa: E741
        """See :func:`polynl.functional.latent_gnn`."""
        y = latent_gnn(v, self.to_latent(v), None if self.from_latent is None else self.from_latent(l))
        return y if self.graph is None else self.graph(y).relu()


def _projection(channels: int, out_channels: int) -> PointwiseNorm:
    return PointwiseNorm(channels, out_channels, bias=False, norm="batch")
