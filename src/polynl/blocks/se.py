"""Squeeze-and-Excitation (Hu 2018) as a block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, factory_of
from polynl.blocks.options import choice, width
from polynl.blocks.pointwise import PointwiseNorm, projected
from polynl.functional.gates import ACTIVATIONS, Activation, Gate, gated, position_sum
from polynl.functional.summary import Summary, counted


class SqueezeExcite(Block):
    """Z = X ⊙ gate(W₂ δ(W₁ Φ(X))), Φ the mean over positions: every channel is scaled by one factor.

    `activation` is δ. `gate` is σ ("sigmoid"), its piecewise linear form ("hard_sigmoid"), or 2σ ("doubled").
    Published modules have σ, which halves an untrained network's features and cannot start as the identity:
    it needs `init="random"`. 2σ differs by a constant factor. `inner_channels` is the width of the hidden
    layer (default: channels // 16, at least 8).

    The summary is Σⱼ xⱼ, a vector: first-order statistics, and no position differs from another.

    Identity: W₂ and its bias are zero, so that 2σ is 1; they receive gradient at once, the rest after the
    first step.

    >>> SqueezeExcite(64)(torch.randn(2, 64, 14, 14)).shape
    torch.Size([2, 64, 14, 14])
    """

    def __init__(
        self,
        channels: int,
        *,
        inner_channels: int | None = None,
        activation: Activation = "relu",
        gate: Gate = "doubled",
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.inner_channels = width("inner_channels", inner_channels, max(8, channels // 16))
        self.activation = choice("activation", activation, Activation)
        self.gate = gate_for(gate, init)
        factory = factory_of(device, dtype)
        self.squeeze = nn.Linear(channels, self.inner_channels, **factory)
        self.out = PointwiseNorm(self.inner_channels, channels, bias=True, zero=init == "identity", **factory)
        self.reset_parameters()

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A vector."""
        return {"values": (self.channels,)}

    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b n"] | None = None,
    ) -> Summary:
        return Summary(counted(x, weights), {"values": position_sum(x, weights)})

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        pooled = summary.mean("values").to(x.dtype).unsqueeze(-2)
        return gated(x, self.out(ACTIVATIONS[self.activation](projected(self.squeeze, pooled))), self.gate)


def gate_for(gate: Gate, init: Init) -> Gate:
    """`gate`, if a block with it can start with `init`."""
    if choice("gate", gate, Gate) != "doubled" and init == "identity":
        raise ValueError(
            f"gate={gate!r}: expected 'doubled' with init='identity', since only 2σ(0) is 1; "
            "use init='random'"
        )
    return gate
