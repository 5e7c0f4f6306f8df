"""The Non-local block (Wang 2018), with the conventions of all public implementations as options."""

from typing import ClassVar, Literal, SupportsIndex

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import (
    AttentionBlock,
    Init,
    Norm,
    Pointwise,
    PointwiseNorm,
    choice,
    flag,
    sizes,
    width,
)
from polynl.functional.gram import mix_by_gram
from polynl.functional.non_local import (
    DotProductForm,
    cheaper_through_gram,
    concatenation_attention,
    dot_product_attention,
    dot_product_mixing,
    softmax_attention,
)

Mode = Literal["dot_product", "embedded_gaussian", "gaussian", "concatenation"]
Scale = Literal["none", "inner", "channels"]
SubSample = Literal["before", "after"]


class NonLocal(AttentionBlock):
    """Z = X + norm(Y W_out), where Y sums g = XW_g over all positions, weighted by similarity.

    With θ = XWθ and φ = XWφ, M the number of keys and `scale` s:

    * ``dot_product`` (Eq. 2): Y = s·θφᵀg / M, in `form` "gram" (linear in N, the default) or "quadratic".
    * ``embedded_gaussian``: Y = softmax(s·θφᵀ) g.
    * ``gaussian``: the same with θ = φ = X.
    * ``concatenation``: Y = ReLU(wᵀ[θᵢ, φⱼ]) g / M.

    `inner_channels` is the width of θ, φ and g (default: channels // 2); `scale` is 1 ("none"), 1/√inner
    ("inner") or 1/√C ("channels"). `sub_sample` max-pools the keys by `pool_size` (an integer, or one per
    spatial axis) before or after the projections φ and g; an axis shorter than the window is pooled whole.
    `bias` adds a bias to θ, φ and g, `out_bias` (default: as `bias`) to the output projection.

    Identity: the scale of the batch norm, or else W_out, is zero; it receives gradient at once, the rest
    after the first step. A layer norm has no scale and turns any W_out other than zero into a branch of unit
    size: with `norm="layer"`, the first step of training is a jump.
    """

    mixes_with: ClassVar = {
        "mode": "dot_product",
        "bias": False,
        "out_bias": False,
        "norm": "none",
        "sub_sample": None,
    }

    def __init__(
        self,
        channels: int,
        *,
        mode: Mode = "dot_product",
        form: DotProductForm | None = None,
        inner_channels: int | None = None,
        scale: Scale = "none",
        sub_sample: SubSample | None = None,
        pool_size: int | tuple[int, ...] = 2,
        norm: Norm = "none",
        bias: bool = False,
        out_bias: bool | None = None,
        init: Init = "identity",
    ) -> None:
        super().__init__(channels, init)
        self.mode = choice("mode", mode, Mode)
        self.form = self._checked_form(form)
        self.inner_channels = width("inner_channels", inner_channels, channels // 2)
        self.scale = choice("scale", scale, Scale if mode != "concatenation" else ("none",))
        self.sub_sample = choice("sub_sample", sub_sample, (None, "before", "after"))
        pool = sizes("pool_size", pool_size, "a whole number, or one for each of 1 to 3 axes", most=3)
        self.pool_size = pool[0] if isinstance(pool_size, SupportsIndex) else pool
        self.norm = choice("norm", norm, Norm)
        self.bias = flag("bias", bias)
        self.out_bias = bias if out_bias is None else flag("out_bias", out_bias)
        inner, embedded = self.inner_channels, mode != "gaussian"
        self.theta = Pointwise(channels, inner, bias=bias) if embedded else None
        self.phi = Pointwise(channels, inner, bias=bias) if embedded else None
        self.g = Pointwise(channels, inner, bias=bias)
        self.pair = nn.Parameter(torch.empty(2 * inner)) if mode == "concatenation" else None
        self.out = PointwiseNorm(inner, channels, bias=self.out_bias, norm=norm)
        self.reset_parameters()

    def _checked_form(self, form: DotProductForm | None) -> DotProductForm | None:
        if self.mode == "dot_product":
            return "gram" if form is None else choice("form", form, DotProductForm)
        if form is not None:
            raise ValueError(f"form={form!r}: expected None, since mode={self.mode!r} has only one form")
        return None

    def reset_parameters(self) -> None:
        """PyTorch's initial values, and a zero output for `init="identity"`."""
        for layer in (self.theta, self.phi, self.g, self.out.linear):
            if layer is not None:
                layer.reset_parameters()
        if self.pair is not None:
            nn.init.normal_(self.pair, std=self.pair.shape[0] ** -0.5)
        if self.init == "identity":
            self.out.zero()

    def transform(self, x: Float[Tensor, "b n c"], spatial: torch.Size) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        if self.form == "gram" and self.mixes and cheaper_through_gram(x, self.inner_channels):
            return mix_by_gram(x, self.mixing)
        return super().transform(x, spatial)

    def projections(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b m d"], Float[Tensor, "b m e"]]:
        """θ, φ and g."""
        keys = self._pooled(x, spatial) if self.sub_sample == "before" else x
        theta = x if self.theta is None else self.theta(x)
        phi = keys if self.phi is None else self.phi(keys)
        g = self.g(keys)
        if self.sub_sample == "after":
            phi, g = self._pooled(phi, spatial), self._pooled(g, spatial)
        return theta, phi, g

    def attention(
        self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b m d"], v: Float[Tensor, "b m e"]
    ) -> Float[Tensor, "b n e"]:
        """The formula of the mode, with θ, φ and g."""
        if self.pair is not None:
            return concatenation_attention(q, k, v, self.pair)
        if self.form is not None:
            return dot_product_attention(q * self._scale(), k, v, self.form)
        return softmax_attention(q, k, v, self._scale())

    def _scale(self) -> float:
        return {"none": 1.0, "inner": self.inner_channels**-0.5, "channels": self.channels**-0.5}[self.scale]

    def keys_of(self, spatial: torch.Size) -> torch.Size:
        """The shape of the pooled map if keys are sub-sampled."""
        if self.sub_sample is None:
            return spatial
        return torch.Size(extent // size for extent, size in zip(spatial, self._window(spatial), strict=True))

    def _pooled(self, x: Float[Tensor, "b n d"], spatial: torch.Size) -> Float[Tensor, "b m d"]:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(spatial) - 1]
        return pool(x.mT.unflatten(-1, spatial), self._window(spatial)).flatten(2).mT

    def _window(self, spatial: torch.Size) -> tuple[int, ...]:
        sizes = self.pool_size if isinstance(self.pool_size, tuple) else (self.pool_size,) * len(spatial)
        if len(sizes) != len(spatial):
            raise ValueError(
                f"NonLocal: x has {len(spatial)} spatial axes; pool_size={self.pool_size!r} has {len(sizes)}"
            )
        return tuple(min(size, extent) for size, extent in zip(sizes, spatial, strict=True))

    def _mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        assert self.theta is not None
        assert self.phi is not None
        return self._scale() * dot_product_mixing(
            gram, self.theta.weight.mT, self.phi.weight.mT, self.g.weight.mT, self.out.linear.weight.mT
        )
