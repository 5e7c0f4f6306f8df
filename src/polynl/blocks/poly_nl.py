"""The Poly-NL layer."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, autocast_is_on, factory_of, laid_out_like
from polynl.blocks.options import choice, divides
from polynl.blocks.pointwise import Pointwise
from polynl.functional.gram import products_round
from polynl.functional.poly_nl import (
    Form,
    Parameters,
    form_of_one,
    poly_nl,
    poly_nl_attend,
    poly_nl_branch,
    poly_nl_of_one,
    poly_nl_sum,
)
from polynl.functional.summary import Summary, counted


class PolyNL(Block):
    """Z = αX + βY with Y = (Φ(XW₁ ⊙ XW₂) ⊙ X) W₃, the paper's Eq. 6. See :func:`polynl.functional.poly_nl`.

    W₁, W₂, W₃ are C×C; α and β are learnable scalars. With `reduction` r > 1, the inner width is C/r:
    W₁, W₂ and a value projection Wᵥ are C×(C/r), W₃ is (C/r)×C, and X inside Y becomes XWᵥ.

    `form` is how the same value is computed: "direct", "gram", or the faster of the two ("auto").

    The summary is Σⱼ xⱼW₁ ⊙ xⱼW₂, a vector of the inner width.

    Identity: α = 1 and β = 0. β receives gradient at once, W₁, W₂ and W₃ after the first step.
    Y is cubic: scaling the input by s scales Y by s³.

    >>> PolyNL(64)(torch.randn(2, 64, 14, 14)).shape
    torch.Size([2, 64, 14, 14])
    """

    adds_contributions = True

    def __init__(
        self,
        channels: int,
        *,
        form: Form = "auto",
        reduction: int = 1,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.form = choice("form", form, Form)
        self.reduction = divides("reduction", reduction, "channels", channels)
        inner, factory = channels // reduction, factory_of(device, dtype)
        # As 1×1 convolutions, which store Wᵀ: their kernels would copy a weight stored as W.
        self.w1 = Pointwise(channels, inner, bias=False, **factory)
        self.w2 = Pointwise(channels, inner, bias=False, **factory)
        self.w3 = Pointwise(inner, channels, bias=False, **factory)
        self.w_value = Pointwise(channels, inner, bias=False, **factory) if reduction > 1 else None
        self.alpha = nn.Parameter(torch.empty((), **factory))
        self.beta = nn.Parameter(torch.empty((), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Variance-preserving matrices; α = 1; β = 0 for the identity, otherwise 1."""
        for layer in (self.w1, self.w2, self.w3, self.w_value):
            if layer is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.ones_(self.alpha)
        nn.init.constant_(self.beta, 0.0 if self.init == "identity" else 1.0)

    def scales(self) -> tuple[Tensor, Tensor]:
        """The learned α and β."""
        return self.alpha, self.beta

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A vector of the inner width."""
        return {"products": (self.channels // self.reduction,)}

    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b n"] | None = None,
    ) -> Summary:
        w1, w2, *_ = self._parameters_of_poly_nl()
        factors = emphasis if weights is None else weights if emphasis is None else weights * emphasis
        return Summary(counted(x, weights), {"products": poly_nl_sum(x, w1, w2, factors, self.form)})

    def _branch(
        self, x: Float[Tensor, "b n c"], summary: Summary, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        _, _, w3, _, _, w_value = self._parameters_of_poly_nl()
        return poly_nl_branch(x, summary.mean("products"), w3, w_value)

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        _, _, w3, alpha, beta, w_value = self._parameters_of_poly_nl()
        return poly_nl_attend(x, summary.mean("products"), w3, alpha, beta, w_value)

    def forward(
        self,
        x: Float[Tensor, "b c *spatial"],
        mask: Shaped[Tensor, "b *mask"] | None = None,
        context: Float[Tensor, "b c *context"] | None = None,
    ) -> Float[Tensor, "b c *spatial"]:
        """Z of the class's formula, in the layout of x."""
        if mask is None and context is None and not torch.is_grad_enabled():
            z = self._of_one(x)
            if z is not None:
                return z
        return super().forward(x, mask, context)

    def _of_one(self, x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b c *spatial"] | None:
        """Z of a single map without gradients; None for all else, such as what needs autocast or an error.

        On a small map, what Python does takes as long as the products, so this does as little as it can.
        """
        shape, parameters = x.shape, self._parameters_of_poly_nl()
        if (
            shape[0] != 1
            or not 3 <= len(shape) <= 5
            or shape[1] != self.channels
            or x.dtype != parameters[0].dtype
            or not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))
            or torch.compiler.is_compiling()
            or autocast_is_on(x)
        ):
            return None
        form = form_of_one(x.dtype, self.channels, x.numel(), parameters[0].shape[0], self.form)
        if form is None or (form == "gram" and products_round()):
            return None
        return laid_out_like(x, poly_nl_of_one(x.flatten(2)[0], *parameters, form=form).view_as(x))

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """See :func:`polynl.functional.poly_nl`."""
        if weights is not None:
            return super()._transform(x, spatial, weights)
        return poly_nl(x, *self._parameters_of_poly_nl(), form=self.form)

    def _parameters_of_poly_nl(self) -> Parameters:
        """As the functions take them, looked up where modules keep them: attributes take longer."""
        layers: dict[str, Any] = self._modules
        own: dict[str, Any] = self._parameters
        w_value = layers.get("w_value")
        return (
            _weight(layers["w1"]),
            _weight(layers["w2"]),
            _weight(layers["w3"]),
            own["alpha"],
            own["beta"],
            None if w_value is None else _weight(w_value),
        )


def _weight(layer: Pointwise) -> Tensor:
    weight = layer._parameters.get("weight")
    return layer.weight if weight is None else weight  # None: parametrized, such as by spectral_norm
