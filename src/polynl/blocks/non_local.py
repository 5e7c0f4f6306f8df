"""The Non-local block (Wang 2018), with the conventions of all public implementations as options."""

from __future__ import annotations

from typing import Literal, SupportsIndex

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.attention import AttentionBlock
from polynl.blocks.base import Device, Init, factory_of
from polynl.blocks.options import choice, flag, sizes, width
from polynl.blocks.pointwise import Norm, PointwiseNorm, is_bare, projected
from polynl.functional.gram import is_tracing, mix, mix_by_gram, outer_sum
from polynl.functional.non_local import (
    DotProductForm,
    cheaper_through_gram,
    concatenation_attention,
    dot_product_attention,
    dot_product_mixing,
    softmax_attention,
)
from polynl.functional.summary import KeysAndValues, Summary, counted

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

    The summary is a matrix, Σⱼ φⱼgⱼᵀ, in `mode` "dot_product". In the others it holds the keys and values
    themselves and grows with the map. Keys that are sub-sampled are those of each part: cut a map between the
    windows of the pool.

    Identity: the scale of the batch norm, or else W_out, is zero; it receives gradient at once, the rest
    after the first step. A layer norm has no scale and turns any W_out other than zero into a branch of unit
    size: with `norm="layer"`, the first step of training is a jump.
    """

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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.mode = choice("mode", mode, Mode)
        self.form = self._checked_form(form)
        self.inner_channels = width("inner_channels", inner_channels, channels // 2)
        self.scale = choice("scale", scale, Scale if mode != "concatenation" else ("none",))
        self.sub_sample = choice("sub_sample", sub_sample, (None, "before", "after"))
        self.uses_grid = sub_sample is not None
        pool = sizes("pool_size", pool_size, "a whole number, or one for each of 1 to 3 axes", most=3)
        self.pool_size = pool[0] if isinstance(pool_size, SupportsIndex) else pool
        self.norm = choice("norm", norm, Norm)
        self.bias = flag("bias", bias)
        self.out_bias = bias if out_bias is None else flag("out_bias", out_bias)
        inner, embedded, factory = self.inner_channels, mode != "gaussian", factory_of(device, dtype)
        self.theta = nn.Linear(channels, inner, bias=bias, **factory) if embedded else None
        self.phi = nn.Linear(channels, inner, bias=bias, **factory) if embedded else None
        self.g = nn.Linear(channels, inner, bias=bias, **factory)
        self.pair = nn.Parameter(torch.empty(2 * inner, **factory)) if mode == "concatenation" else None
        zero = init == "identity"
        self.out = PointwiseNorm(inner, channels, bias=self.out_bias, norm=norm, zero=zero, **factory)
        self.reset_parameters()

    def _checked_form(self, form: DotProductForm | None) -> DotProductForm | None:
        if self.mode == "dot_product":
            return "gram" if form is None else choice("form", form, DotProductForm)
        if form is not None:
            raise ValueError(f"form={form!r}: expected None, since mode={self.mode!r} has only one form")
        return None

    def reset_parameters(self) -> None:
        """PyTorch's initial values, and a zero output for `init="identity"`."""
        super().reset_parameters()
        if self.pair is not None:
            nn.init.normal_(self.pair, std=self.pair.shape[0] ** -0.5)

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """A matrix, or the widths of keys and values."""
        inner = self.inner_channels
        if self.mode == "dot_product":
            return {"values": (inner, inner)}
        return {"keys": (self.channels if self.phi is None else inner,), "values": (inner,)}

    def queries_of(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """θ."""
        return x if self.theta is None else projected(self.theta, x)

    def keys_and_values(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b m d"], Float[Tensor, "b m e"], Float[Tensor, "b m"] | None]:
        """φ and g."""
        keys = self._pooled(x, spatial, weights) if self.sub_sample == "before" else x
        phi, g = keys if self.phi is None else projected(self.phi, keys), projected(self.g, keys)
        if self.sub_sample == "after":
            phi, g = self._pooled(phi, spatial, weights), self._pooled(g, spatial, weights)
        if weights is not None and self.sub_sample is not None:
            weights = self._pooled(weights.unsqueeze(-1), spatial).squeeze(-1)
        return phi, g, weights

    def summary_of(
        self, k: Float[Tensor, "b m d"], v: Float[Tensor, "b m e"], weights: Float[Tensor, "b m"] | None
    ) -> Summary:
        """Σⱼ φⱼgⱼᵀ, or the keys and values."""
        count = counted(k, weights)
        if self.mode == "dot_product":
            return Summary(
                count, {"values": outer_sum(k if weights is None else k * weights.unsqueeze(-1), v)}
            )
        masked = {} if weights is None else {"weights": weights}
        return KeysAndValues(count, {"keys": k, "values": v, **masked})

    def attention(self, q: Float[Tensor, "b n d"], summary: Summary) -> Float[Tensor, "b n e"]:
        """The formula of the mode, with θ, φ and g."""
        if self.mode == "dot_product":
            return mix(q * self._scale(), summary.mean("values"))
        parts = {name: part.to(q.dtype) for name, part in summary.parts.items()}
        k, v, weights = parts["keys"], parts["values"], parts.get("weights")
        if self.pair is not None:
            count = (summary.count + (summary.count == 0)).to(q.dtype)
            return concatenation_attention(q, k, v / count[:, None, None], self.pair, weights)
        return softmax_attention(q, k, v, self._scale(), weights)

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        if weights is not None:
            return super()._transform(x, spatial, weights)
        if self.form == "quadratic":
            k, v, _ = self.keys_and_values(x, spatial)
            return x + self.out(dot_product_attention(self.queries_of(x) * self._scale(), k, v, self.form))
        if self._mixes and cheaper_through_gram(x, self.inner_channels):
            return mix_by_gram(x, self._mixing)
        return super()._transform(x, spatial)

    @property
    def _mixes(self) -> bool:
        """Whether Y = X·M(G) with M = `_mixing` and G the Gram matrix of X."""
        plain = not (self.bias or self.out_bias) and self.norm == "none" and self.sub_sample is None
        return plain and self.mode == "dot_product" and is_bare(self.theta, self.phi, self.g, self.out)

    def _scale(self) -> float:
        return {"none": 1.0, "inner": self.inner_channels**-0.5, "channels": self.channels**-0.5}[self.scale]

    def keys_of(self, spatial: torch.Size) -> torch.Size:
        """The shape of the pooled map if keys are sub-sampled."""
        if self.sub_sample is None:
            return spatial
        return torch.Size(extent // size for extent, size in zip(spatial, self._window(spatial), strict=True))

    def _pooled(
        self, x: Float[Tensor, "b n d"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b m d"]:
        """The maxima of each window over its positions whose weight is not 0; zero if there are none."""
        if 0 in spatial:
            return x  # torch does not pool maps without positions
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(spatial) - 1]
        lowest = torch.finfo(x.dtype).min
        if weights is not None:
            x = x.masked_fill((weights == 0).unsqueeze(-1), lowest)
        pooled = (
            pool(x.transpose(-2, -1).unflatten(-1, spatial), self._window(spatial))
            .flatten(2)
            .transpose(-2, -1)
        )
        return pooled if weights is None else pooled.masked_fill(pooled == lowest, 0)

    def _window(self, spatial: torch.Size) -> tuple[int, ...]:
        sizes = self.pool_size if isinstance(self.pool_size, tuple) else (self.pool_size,) * len(spatial)
        if len(sizes) != len(spatial):
            raise ValueError(
                f"NonLocal: x has {len(spatial)} spatial axes; pool_size={self.pool_size!r} has {len(sizes)}"
            )
        window = tuple(min(size, extent) for size, extent in zip(sizes, spatial, strict=True))
        if is_tracing() and window != tuple(sizes):
            raise ValueError(
                f"NonLocal: x has {tuple(map(int, spatial))} positions; a trace that pools needs at least "
                f"{tuple(sizes)}, or it would be wrong for larger maps"
            )
        return window

    def _mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        assert self.theta is not None
        assert self.phi is not None
        return self._scale() * dot_product_mixing(
            gram, self.theta.weight, self.phi.weight, self.g.weight, self.out.weight
        )
