"""Cross-covariance attention (XCiT, El-Nouby 2021) as a block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, factory_of
from polynl.blocks.options import divides, flag, residual_flag
from polynl.blocks.pointwise import PointwiseNorm, is_bare, projected
from polynl.functional.efficient import attend_by_head
from polynl.functional.gram import mix_by_gram
from polynl.functional.summary import Summary, counted
from polynl.functional.xca import channel_attention, xca_is_cheaper_through_gram, xca_mixing, xca_sums


class XCA(Block):
    """Z = X + Y W_out with Y = v Aᵀ and A = softmax(τ q̂ᵀk̂), which is channels × channels, in each of `heads`.

    q̂ and k̂ are q = XW_q and k = XW_k with channels of unit length over positions; τ is learned per head. So
    Y = X·M(G), like Poly-NL and the dot product, but with an M that is not linear in the Gram matrix G:
    there is no influence of single positions. Large maps are computed through G if `bias` is False.

    `bias` is that of q, k and v; W_out has one. `residual=False` leaves X out, as the published module does.

    The summary holds Σⱼ qⱼkⱼᵀ of each head, Σⱼ qⱼ² and Σⱼ kⱼ².

    Identity: W_out and its bias are zero; they receive gradient at once, the rest after the first step.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int = 1,
        bias: bool = False,
        residual: bool = True,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.heads = divides("heads", heads, "channels", channels)
        self.bias = flag("bias", bias)
        self.residual = residual_flag(residual, init)
        factory = factory_of(device, dtype)
        self.q = nn.Linear(channels, channels, bias=bias, **factory)
        self.k = nn.Linear(channels, channels, bias=bias, **factory)
        self.v = nn.Linear(channels, channels, bias=bias, **factory)
        self.temperature = nn.Parameter(torch.empty(heads, 1, 1, **factory))
        self.out = PointwiseNorm(channels, channels, bias=True, zero=init == "identity", **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's initial values, τ = 1, and a zero output for `init="identity"`."""
        super().reset_parameters()
        nn.init.ones_(self.temperature)

    def scales(self) -> tuple[float, float]:
        """X is added, or it is not."""
        return float(self.residual), 1.0

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A matrix and two vectors per head."""
        width = self.channels // self.heads
        vector = (self.heads, width)
        return {"products": (*vector, width), "q_squares": vector, "k_squares": vector}

    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b n"] | None = None,
    ) -> Summary:
        sums = xca_sums(projected(self.q, x), projected(self.k, x), self.heads, weights)
        return Summary(counted(x, weights), dict(zip(self.summary_shapes(), sums, strict=True)))

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        attention = channel_attention(**summary.parts, temperature=self.temperature)
        y = self.out(attend_by_head(projected(self.v, x), attention.transpose(-2, -1), "none"))
        return x + y if self.residual else y

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        mixes = self.residual and not self.bias and is_bare(self.q, self.k, self.v, self.out)
        if weights is not None or not mixes or not xca_is_cheaper_through_gram(x, self.heads):
            return super()._transform(x, spatial, weights)
        assert self.out.bias is not None
        return mix_by_gram(x, self._mixing) + self.out.bias

    def _mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        matrices = (self.q.weight, self.k.weight, self.v.weight, self.out.weight)
        return xca_mixing(gram, *matrices, self.temperature)
