"""The Poly-NL layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, autocast_is_on, factory_of, laid_out_like, without
from polynl.blocks.options import choice, divides, sizes
from polynl.blocks.pointwise import is_bare, projected
from polynl.functional.gram import add_product, is_tracing, products_round
from polynl.functional.poly_nl import (
    Form,
    Parameters,
    form_of_one,
    poly_nl,
    poly_nl_of_one,
    poly_nl_sum,
    sum_of_products,
    wide_products,
)
from polynl.functional.summary import Summary, counted
from polynl.functional.window import windowed_mean


class PolyNL(Block):
    """Z = αX + βY with Y = (Φ(XW₁ ⊙ XW₂) ⊙ X) W₃, the paper's Eq. 6. See :func:`polynl.functional.poly_nl`.

    W₁, W₂, W₃ are C×C; α and β are learnable scalars. With `reduction` r > 1, the inner width is C/r:
    W₁, W₂ and a value projection Wᵥ are C×(C/r), W₃ is (C/r)×C, and X inside Y becomes XWᵥ.

    `form` is how the same value is computed: "direct", "gram", or the faster of the two ("auto").

    With `window`, a whole number or one for each axis, Φ is the mean over so many positions around each one,
    instead of over all: for maps much larger than those of training. It can be set later, as in
    `block.window = 64`, and holds in training mode too. See :func:`polynl.functional.windowed_mean`.

    The summary is Σⱼ xⱼW₁ ⊙ xⱼW₂, a vector of the inner width; with a window there is none.

    Identity: α = 1 and β = 0. β receives gradient at once, W₁, W₂ and W₃ after the first step.
    Y is cubic: scaling the input by s scales Y by s³.

    >>> PolyNL(64)(torch.randn(2, 64, 14, 14)).shape
    torch.Size([2, 64, 14, 14])
    """

    adds_contributions = True
    _window: int | tuple[int, ...] | None = None

    def __init__(
        self,
        channels: int,
        *,
        form: Form = "auto",
        reduction: int = 1,
        window: int | Sequence[int] | None = None,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.form = choice("form", form, Form)
        self.reduction = divides("reduction", reduction, "channels", channels)
        self.window = window
        inner, factory = channels // reduction, factory_of(device, dtype)
        # As 1×1 convolutions, which store Wᵀ: their kernels would copy a weight stored as W.
        self.w1 = nn.Linear(channels, inner, bias=False, **factory)
        self.w2 = nn.Linear(channels, inner, bias=False, **factory)
        self.w3 = nn.Linear(inner, channels, bias=False, **factory)
        self.w_value = nn.Linear(channels, inner, bias=False, **factory) if reduction > 1 else None
        self.alpha = nn.Parameter(torch.empty(1, **factory))
        self.beta = nn.Parameter(torch.empty(1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Variance-preserving matrices; α = 1; β = 0 for the identity, otherwise 1."""
        for layer in (self.w1, self.w2, self.w3, self.w_value):
            if layer is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.ones_(self.alpha)
        nn.init.constant_(self.beta, 0.0 if self.init == "identity" else 1.0)

    @property
    def window(self) -> int | tuple[int, ...] | None:
        """The positions around each one that it sees, for all axes or for each; None for all positions."""
        return self._window

    @window.setter
    def window(self, window: int | Sequence[int] | None) -> None:
        if window is not None:
            given = sizes("window", window, "a whole number above 0, or one for each axis", most=3)
            window = given if isinstance(window, Sequence) else given[0]
        self._window = window
        self.uses_grid = window is not None

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
        self._check_no_window("summary")
        factors = emphasis if weights is None else weights if emphasis is None else weights * emphasis
        if is_bare(self.w1, self.w2):
            products = poly_nl_sum(x, self.w1.weight, self.w2.weight, factors, self.form)
        else:
            products = sum_of_products(projected(self.w1, x), projected(self.w2, x), factors)
        return Summary(counted(x, weights), {"products": products})

    def _branch(
        self, x: Float[Tensor, "b n c"], summary: Summary, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        return self._branch_of(x, summary.mean("products").unsqueeze(-2))

    def _branch_of(
        self, x: Float[Tensor, "b n c"], pooled: Float[Tensor, "b #n d"]
    ) -> Float[Tensor, "b n c"]:
        values = x if self.w_value is None else projected(self.w_value, x)
        return projected(self.w3, values * pooled.to(x.dtype))

    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        self._check_no_window("summary to attend to")
        return add_product(
            self._branch_of(x, self.beta * summary.mean("products").unsqueeze(-2)), self.alpha, x
        )

    def _check_no_window(self, what: str) -> None:
        if self._window is not None:
            raise ValueError(
                f"PolyNL: with window={self._window}, every position has a mean of its own, and there is no "
                f"{what}; set block.window = None for the whole map"
            )

    def why_not_in_parts(self) -> str | None:
        """A window crosses the borders of parts."""
        return super().why_not_in_parts() if self._window is None else "its window is around every position"

    def forward(
        self,
        x: Float[Tensor, "b c *spatial"],
        mask: Shaped[Tensor, "b *mask"] | None = None,
        context: Float[Tensor, "b c *context"] | None = None,
    ) -> Float[Tensor, "b c *spatial"]:
        """Z of the class's formula, in the layout of x."""
        alone = mask is None and context is None and self.exchange is None and self._window is None
        if alone and isinstance(x, Tensor) and not torch.is_grad_enabled():
            z = self._of_one(x)
            if z is not None:
                return z
        return super().forward(x, mask, context)

    def _of_one(self, x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b c *spatial"] | None:
        """Z of a single map without gradients; None for all else, such as what needs autocast or an error.

        On a small map, what Python does takes as long as the products, so this does as little as it can.
        """
        shape, parameters = x.shape, self._bare_parameters()
        if (
            parameters is None
            or shape[0] != 1
            or not 3 <= len(shape) <= 5
            or shape[1] != self.channels
            or x.dtype != parameters[0].dtype
            or not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))
            or torch.compiler.is_compiling()
            or is_tracing()
            or torch._C._are_functorch_transforms_active()
            or autocast_is_on(x)
        ):
            return None
        form = form_of_one(x.dtype, self.channels, x.numel(), parameters[0].shape[0], self.form)
        if form is None or (form == "gram" and products_round()):
            return None
        # A view of contiguous maps takes half the time that flattening takes.
        folded = x.view(shape[1], -1) if x.is_contiguous() else x.flatten(2)[0]
        return laid_out_like(x, poly_nl_of_one(folded, *parameters, form=form).view_as(x))

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """See :func:`polynl.functional.poly_nl`."""
        if self._window is not None:
            return self._in_windows(x, spatial, self._window, weights)
        parameters = self._bare_parameters()
        if parameters is None or weights is not None:
            return super()._transform(x, spatial, weights)
        return poly_nl(x, *parameters, form=self.form)

    def _in_windows(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        window: int | tuple[int, ...],
        weights: Float[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Z with a mean for every position; see :func:`polynl.functional.windowed_mean`."""
        window = (window,) * len(spatial) if isinstance(window, int) else window
        if len(window) != len(spatial):
            raise ValueError(f"PolyNL: window={window} is for {len(window)} axes; x has {len(spatial)}")
        seen = without(x, weights)
        products = wide_products(projected(self.w1, seen), projected(self.w2, seen))
        pooled = windowed_mean(products, spatial, window, weights)
        return add_product(self._branch_of(x, self.beta * pooled), self.alpha, x)

    def _bare_parameters(self) -> Parameters | None:
        """As the functions take them; None if a layer has to be called.

        They are looked up where modules keep them: attributes take longer.
        """
        layers: dict[str, Any] = self._modules
        w1, w2, w3, w_value = layers["w1"], layers["w2"], layers["w3"], layers.get("w_value")
        own: dict[str, Any] = self._parameters
        if not is_bare(w1, w2, w3, w_value) or "alpha" not in own or "beta" not in own:
            return None
        return (
            w1._parameters["weight"],
            w2._parameters["weight"],
            w3._parameters["weight"],
            own["alpha"],
            own["beta"],
            None if w_value is None else w_value._parameters["weight"],
        )
