"""Global response normalization (ConvNeXt V2, Woo 2023) as a block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, factory_of
from polynl.functional.gates import response
from polynl.functional.gram import add_product
from polynl.functional.poly_nl import sum_of_products
from polynl.functional.summary import Summary, counted


class GlobalResponseNorm(Block):
    """Z = X + γ ⊙ X ⊙ n + β with n_c = ‖x_c‖ / (mean of ‖x_c‖ over channels), norms over all positions.

    ‖x_c‖² = N·G_cc: of all second-order statistics, it uses the diagonal of the Gram matrix. No matrix is
    learned.

    The summary is Σⱼ xⱼ², a vector.

    Identity: γ and β are zero, as published. They receive gradient at once, and there is nothing else.
    """

    def __init__(
        self,
        channels: int,
        *,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        factory = factory_of(device, dtype)
        self.weight = nn.Parameter(torch.empty(channels, **factory))
        self.bias = nn.Parameter(torch.empty(channels, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros for the identity; otherwise a random γ."""
        if self.init == "identity":
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A vector."""
        return {"squares": (self.channels,)}

    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b n"] | None = None,
    ) -> Summary:
        return Summary(counted(x, weights), {"squares": sum_of_products(x, x, weights)})

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        factors = self.weight * response(summary.parts["squares"]).to(x.dtype).unsqueeze(-2)
        return x + add_product(self.bias, x, factors)
