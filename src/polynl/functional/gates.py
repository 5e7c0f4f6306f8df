"""Layers that gate or shift channels by one vector of the whole map: SE, GCNet and GRN."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Gate = Literal["doubled", "sigmoid", "hard_sigmoid"]
Activation = Literal["relu", "silu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "silu": F.silu}
EPSILON = 1e-6  # of GRN as published


def position_sum(
    x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"] | None = None
) -> Float[Tensor, "b c"]:
    """Σⱼ mⱼ xⱼ with the weights m of the positions, in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x if weights is None else x * weights.unsqueeze(-1)).sum(dim=-2, dtype=wide)


def gated(x: Float[Tensor, "b n c"], scores: Float[Tensor, "b 1 c"], gate: Gate) -> Float[Tensor, "b n c"]:
    """X ⊙ gate(scores), the same factors at every position.

    ``sigmoid`` is σ(s), ``hard_sigmoid`` is clamp(s/6 + 1/2, 0, 1), and ``doubled`` is 2σ(s): 1 at s = 0.
    """
    if gate == "hard_sigmoid":
        return x * F.hardsigmoid(scores)
    return x * (2 * scores.sigmoid() if gate == "doubled" else scores.sigmoid())


def response(squares: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
    """‖x_c‖ / (mean of ‖x_c‖ over channels + 10⁻⁶), from the sums of squares ‖x_c‖²."""
    # The root of zero has no derivative; like that of torch's norm it is taken to be zero.
    nothing = squares == 0
    norms = squares.masked_fill(nothing, 1).sqrt().masked_fill(nothing, 0)
    return norms / (norms.mean(dim=-1, keepdim=True) + EPSILON)


# The literal references: fp64, one sample (n, c), no code shared with the fast form. Only tests may use them.


def squeeze_excite_reference(
    x: Float[Tensor, "n c"],
    pooled: Float[Tensor, "m c"],
    squeeze: Callable[[Tensor], Tensor],
    excite: Callable[[Tensor], Tensor],
    activation: Activation,
    gate: Gate,
) -> Float[Tensor, "n c"]:
    """x ⊙ gate(W₂ δ(W₁ · mean of the pooled map)) (Hu 2018, Eq. 2 to 4)."""
    x, pooled = x.double(), pooled.double()
    hidden = squeeze(pooled.sum(dim=0) / len(pooled))
    hidden = hidden.clamp_min(0) if activation == "relu" else hidden / (1 + torch.exp(-hidden))
    scores = excite(hidden)
    if gate == "hard_sigmoid":
        return x * (scores / 6 + 0.5).clamp(0, 1)
    return x * ((2 if gate == "doubled" else 1) / (1 + torch.exp(-scores)))


def global_context_reference(x: Float[Tensor, "m c"], scores: Float[Tensor, " m"]) -> Float[Tensor, " c"]:
    """The context Σⱼ xⱼ e^sⱼ / Σₘ e^sₘ (Cao 2019, Eq. 5)."""
    x, weights = x.double(), scores.double().exp()
    return (x * weights[:, None]).sum(dim=0) / weights.sum()


def response_norm_reference(
    x: Float[Tensor, "n c"],
    pooled: Float[Tensor, "m c"],
    weight: Float[Tensor, " c"],
    bias: Float[Tensor, " c"],
) -> Float[Tensor, "n c"]:
    """γ ⊙ x ⊙ N(G(x)) + β + x, G the L2 norms of channels and N(g) = g / mean(g) (Woo 2023, Eq. 1 to 3)."""
    x, pooled = x.double(), pooled.double()
    norms = torch.stack([channel.norm() for channel in pooled.T])
    return weight * x * (norms / (norms.sum() / len(norms) + 1e-6)) + bias + x
