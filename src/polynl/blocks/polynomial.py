"""The trainable polynomial layer of Π-nets (Chrysos 2020), in factored form."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Device, Init, LocalBlock, factory_of
from polynl.blocks.options import flag, positive, width
from polynl.functional.polynomial import ccp
from polynl.functional.summary import Summary


class PolynomialLayer(LocalBlock):
    """A polynomial of order D of the channels at each position, with Π-net's coupled CP factors (CCP).

    o = U₁h, then o ← (Uᵢh) ⊙ o + o for i = 2 … D, and Z = Co + bias. The Uᵢ are `rank` × C (default: C × C).
    See :func:`polynl.functional.ccp`. Unlike the non-local blocks, it is local and has terms of every order
    up to D (Eq. 3).

    Identity: U₁ and C are identities and the other Uᵢ zero, which needs `rank` ≥ C; all of them receive
    gradient at once.
    """

    def __init__(
        self,
        channels: int,
        *,
        order: int = 3,
        rank: int | None = None,
        bias: bool = True,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.order = positive("order", order)
        self.rank = width("rank", rank, channels)
        self.bias = flag("bias", bias)
        if init == "identity" and self.rank < channels:
            raise ValueError(
                f"rank={rank}: expected at least channels={channels} to start as the identity; "
                "use a larger rank, or init='random'"
            )
        factory = factory_of(device, dtype)
        self.factors = nn.Parameter(torch.empty(order, self.rank, channels, **factory))
        self.out = nn.Parameter(torch.empty(channels, self.rank, **factory))
        self.offset = nn.Parameter(torch.empty(channels, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Identity or variance-preserving matrices; a zero bias."""
        if self.init == "identity":
            nn.init.zeros_(self.factors)
            nn.init.eye_(self.factors[0])
            nn.init.eye_(self.out)
        else:
            for weight in (self.factors, self.out):
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        if self.offset is not None:
            nn.init.zeros_(self.offset)

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """See :func:`polynl.functional.ccp`."""
        return ccp(x, self.factors.unbind(), self.out, self.offset)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load older state dicts too, in which every factor had a key of its own."""
        keys = [f"{prefix}factors.{i}" for i in range(self.order)]
        if all(key in state_dict for key in keys):
            state_dict[f"{prefix}factors"] = torch.stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *args)
