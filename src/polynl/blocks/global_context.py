"""The global context block of GCNet (Cao 2019)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, factory_of
from polynl.blocks.options import choice, width
from polynl.blocks.pointwise import PointwiseNorm, projected
from polynl.blocks.se import gate_for
from polynl.functional.efficient import softmax_sums_by_head
from polynl.functional.gates import Gate, gated, position_sum
from polynl.functional.summary import SoftmaxSummary, Summary, counted

Fusion = Literal["add", "scale", "both"]
Pooling = Literal["softmax", "mean"]


class GlobalContext(Block):
    """Z = X + t(p), where p = Σⱼ softmaxⱼ(xⱼ·w) xⱼ is one vector of the map and t(p) = W₂ ReLU(LN(W₁ p)).

    `fusion` is how every position uses the vector: "add" as above (GCNet), "scale", Z = X ⊙ gate(t(p))
    (timm's default), or "both", scaled first, each with a t of its own. `gate`: see :class:`SqueezeExcite`.
    `pooling="mean"` replaces p by the mean. `inner_channels` is the width of LN (default: channels // 8, at
    least 8).

    The summary holds the sums of e^s and of e^s x, s = xⱼ·w, or the sum of x.

    Identity: W₂ and its bias are zero; they receive gradient at once, the rest after the first step.
    """

    def __init__(
        self,
        channels: int,
        *,
        fusion: Fusion = "add",
        pooling: Pooling = "softmax",
        inner_channels: int | None = None,
        gate: Gate = "doubled",
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.fusion = choice("fusion", fusion, Fusion)
        self.pooling = choice("pooling", pooling, Pooling)
        self.inner_channels = width("inner_channels", inner_channels, max(8, channels // 8))
        self.gate = gate_for(gate, init)
        factory = factory_of(device, dtype)
        self.scores = nn.Linear(channels, 1, **factory) if pooling == "softmax" else None
        make = {"channels": channels, "inner": self.inner_channels, "zero": init == "identity", **factory}
        self.scale = Bottleneck(**make) if fusion != "add" else None
        self.add = Bottleneck(**make) if fusion != "scale" else None
        self.reset_parameters()

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A vector and, with the softmax, two numbers."""
        if self.scores is None:
            return {"values": (self.channels,)}
        return {"maximum": (1, 1), "exponentials": (1, 1), "values": (1, 1, self.channels)}

    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b n"] | None = None,
    ) -> Summary:
        count = counted(x, weights)
        if self.scores is None:
            return Summary(count, {"values": position_sum(x, weights)})
        sums = softmax_sums_by_head(projected(self.scores, x), x, 1, weights)
        return SoftmaxSummary(count, dict(zip(("maximum", "exponentials", "values"), sums, strict=True)))

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        context = summary.mean("values").to(x.dtype).reshape(-1, 1, self.channels)
        z = x if self.scale is None else gated(x, self.scale(context), self.gate)
        return z if self.add is None else z + self.add(context)


class Bottleneck(nn.Module):
    """W₂ ReLU(LN(W₁ p)) of one vector per sample."""

    def __init__(self, channels: int, inner: int, *, zero: bool, **factory: Any) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, inner, **factory)
        self.norm = nn.LayerNorm(inner, eps=1e-6, **factory)
        self.out = PointwiseNorm(inner, channels, bias=True, zero=zero, **factory)

    def forward(self, context: Float[Tensor, "b 1 c"]) -> Float[Tensor, "b 1 c"]:
        """One vector per sample."""
        return self.out(self.norm(projected(self.squeeze, context)).relu())
