"""Latent-GNN (Zhang 2019) as a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, factory_of, without
from polynl.blocks.options import choice, flag, sizes, width
from polynl.blocks.pointwise import PointwiseNorm
from polynl.functional.latent_gnn import latent_attend, latent_sums, unit_length
from polynl.functional.summary import Summary, counted

Mode = Literal["asymmetric", "symmetric"]


class LatentGNN(Block):
    """Z = X + γ·norm([Y₁, …, Y_K] W_out), one Y per kernel; `latent_dims` are the latent nodes of each.

    v and l are X projected to `inner_channels` (default: channels // 4), batch-normalised and scaled to unit
    length at each position; in `mode` "symmetric" they are the same. A kernel connects v to its nodes and the
    nodes to l: see :func:`polynl.functional.latent_gnn`. With `graph_conv`, its result goes through one more
    projection, norm and ReLU.

    The summary holds the nodes of every kernel and, in asymmetric mode, the squares that they are divided by.

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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        nodes = "the number of latent nodes of one kernel, or of each of several"
        self.latent_dims = sizes("latent_dims", latent_dims, nodes)
        self.inner_channels = width("inner_channels", inner_channels, channels // 4)
        self.mode = choice("mode", mode, Mode)
        self.graph_conv = flag("graph_conv", graph_conv)
        inner, factory = self.inner_channels, factory_of(device, dtype)
        self.to_latent = _projection(channels, inner, **factory)
        self.from_latent = _projection(channels, inner, **factory) if mode == "asymmetric" else None
        self.kernels: Any = nn.ModuleList(
            LatentKernel(inner, nodes, mode, graph_conv=graph_conv, **factory) for nodes in self.latent_dims
        )
        self.out = _projection(inner * len(self.latent_dims), channels, **factory)
        self.gamma = nn.Parameter(torch.empty(1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's initial values; γ = 0 for the identity, otherwise 1."""
        super().reset_parameters()
        nn.init.constant_(self.gamma, 0.0 if self.init == "identity" else 1.0)

    def scales(self) -> tuple[Tensor | float, Tensor | float]:
        """1 and γ."""
        return 1.0, self.gamma

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every kernel the nodes and, in asymmetric mode, a number for each."""
        shapes: dict[str, tuple[int, ...]] = {}
        for i, nodes in enumerate(self.latent_dims):
            shapes[f"nodes_{i}"] = (nodes, self.inner_channels)
            if self.mode == "asymmetric":
                shapes[f"squares_{i}"] = (nodes,)
        return shapes

    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b n"] | None = None,
    ) -> Summary:
        v = unit_length(self.to_latent(x, weights), dim=-1)
        return self._summary_of(v, [kernel.to_latent(v, weights) for kernel in self.kernels], weights)

    def _summary_of(
        self,
        v: Float[Tensor, "b n e"],
        to_latent: Sequence[Float[Tensor, "b n d"]],
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Summary:
        parts: dict[str, Tensor] = {}
        for i, a in enumerate(to_latent):
            nodes, squares = latent_sums(v, a, weights, symmetric=self.mode == "symmetric")
            parts[f"nodes_{i}"] = nodes
            if squares is not None:
                parts[f"squares_{i}"] = squares
        return Summary(counted(v, weights), parts)

    def _branch(
        self, x: Float[Tensor, "b n c"], summary: Summary, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        project = self.to_latent if self.from_latent is None else self.from_latent
        l = unit_length(project(x, weights), dim=-1)  # noqa: E741
        return self._branch_of(
            [kernel.out_of_latent(l, weights) for kernel in self.kernels], summary, weights
        )

    def _branch_of(
        self,
        from_latent: Sequence[Float[Tensor, "b n d"]],
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        outputs = []
        for i, (kernel, b) in enumerate(zip(self.kernels, from_latent, strict=True)):
            y = latent_attend(b, summary.parts[f"nodes_{i}"], summary.parts.get(f"squares_{i}"))
            outputs.append(y if kernel.graph is None else kernel.graph(y, weights).relu())
        return self.out(torch.cat(outputs, dim=-1), weights)

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        return x + self.gamma * self._branch(x, summary, weights)

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        if self.mode == "asymmetric":
            return super()._transform(x, spatial, weights)
        # Summary and branch share their projections, and batch norms must see a map once.
        v = unit_length(self.to_latent(x, weights), dim=-1)
        to_latent = [kernel.to_latent(v, weights) for kernel in self.kernels]
        summary = self._summary_of(without(v, weights), [without(a, weights) for a in to_latent], weights)
        return x + self.gamma * self._branch_of(to_latent, summary, weights)


class LatentKernel(nn.Module):
    """The parameters of one kernel, which connects positions to its latent nodes."""

    def __init__(self, channels: int, nodes: int, mode: Mode, *, graph_conv: bool, **factory: Any) -> None:
        super().__init__()
        self.to_latent = _projection(channels, nodes, **factory)
        self.from_latent = _projection(channels, nodes, **factory) if mode == "asymmetric" else None
        self.graph = _projection(channels, channels, **factory) if graph_conv else None

    @property
    def out_of_latent(self) -> PointwiseNorm:
        """`from_latent`, or in symmetric mode `to_latent`."""
        return self.to_latent if self.from_latent is None else self.from_latent


def _projection(channels: int, out_channels: int, **factory: Any) -> PointwiseNorm:
    return PointwiseNorm(channels, out_channels, bias=False, norm="batch", **factory)
