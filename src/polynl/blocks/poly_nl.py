"""The Poly-NL layer."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Init, Pointwise, choice, divides
from polynl.functional.poly_nl import Form, poly_nl, poly_nl_mixing


class PolyNL(Block):
    """Z = αX + βY with Y = (Φ(XW₁ ⊙ XW₂) ⊙ X) W₃, the paper's Eq. 6. See :func:`polynl.functional.poly_nl`.

    W₁, W₂, W₃ are C×C; α and β are learnable scalars. With `reduction` r > 1, the inner width is C/r:
    W₁, W₂ and a value projection Wᵥ are C×(C/r), W₃ is (C/r)×C, and X inside Y becomes XWᵥ.

    `form` is how the same value is computed: "direct", "gram", or the faster of the two ("auto").

    Identity: α = 1 and β = 0. β receives gradient at once, W₁, W₂ and W₃ after the first step.
    Y is cubic: scaling the input by s scales Y by s³.

    >>> PolyNL(64)(torch.randn(2, 64, 14, 14)).shape
    torch.Size([2, 64, 14, 14])
    """

    mixes_with: ClassVar = {}

    def __init__(
        self, channels: int, *, form: Form = "auto", reduction: int = 1, init: Init = "identity"
    ) -> None:
        super().__init__(channels, init)
        self.form = choice("form", form, Form)
        self.reduction = divides("reduction", reduction, "channels", channels)
        inner = channels // reduction
        # As 1×1 convolutions, which store Wᵀ: their kernels would copy a weight stored as W.
        self.w1 = Pointwise(channels, inner, bias=False)
        self.w2 = Pointwise(channels, inner, bias=False)
        self.w3 = Pointwise(inner, channels, bias=False)
        self.w_value = Pointwise(channels, inner, bias=False) if reduction > 1 else None
        self.alpha = nn.Parameter(torch.empty(()))
        self.beta = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Variance-preserving matrices; α = 1; β = 0 for the identity, otherwise 1."""
        for layer in (self.w1, self.w2, self.w3, self.w_value):
            if layer is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.ones_(self.alpha)
        nn.init.constant_(self.beta, 0.0 if self.init == "identity" else 1.0)

    def transform(self, x: Float[Tensor, "b n c"], spatial: torch.Size) -> Float[Tensor, "b n c"]:
        """See :func:`polynl.functional.poly_nl`."""
        w1, w2, w3, w_value = self._matrices()
        return poly_nl(x, w1, w2, w3, self.alpha, self.beta, w_value, self.form)

    def scales(self) -> tuple[Tensor | float, Tensor | float]:
        """The learned α and β."""
        return self.alpha, self.beta

    def _mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        return poly_nl_mixing(gram, *self._matrices())

    def _matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        value = None if self.w_value is None else self.w_value.weight.mT
        return self.w1.weight.mT, self.w2.weight.mT, self.w3.weight.mT, value
