"""TESA (Babiloni 2020) as a block: a reconstruction, since no code is public."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.base import Block, Device, Init, factory_of
from polynl.blocks.options import choice
from polynl.blocks.pointwise import PointwiseNorm, projected
from polynl.functional.summary import Summary
from polynl.functional.tesa import Normalization, Order, tesa_mode

Embedding = Literal["linear", "none"]
Fusion = Literal["sum", "concat"]

NO_SUMMARY = (
    "TESA has no summary, and so no mask or context: along rows and columns it is not a sum over positions"
)


class TESA(Block):
    """Z = X + fused(Y₁, …, Y_R) W_out, one Y for each axis r of the feature tensor, including the channels.

    Y_r = fold(A₍r₎ B₍r₎ᵀ V₍r₎), the matricizations of three embeddings of X along axis r: see
    :func:`polynl.functional.tesa_mode`, also for `order`, which changes the cost and not the value.

    **This is a reconstruction.** Published are the three matricizations of an H×W×C tensor, the six matrix
    products, and that the results of the modes are fused. Everything else is an option:

    * `embedding`: "linear", A, B and V are 1×1 convolutions of X; "none", all three are X.
    * `normalization`: "mean", Y_r is divided by the number of columns of its matricization; "none".
    * `fusion`: "sum" adds the modes; "concat" concatenates them, for maps with `spatial_axes` axes only.

    Identity: W_out is zero; it receives gradient at once, the rest after the first step.
    """

    takes_masks = False
    uses_grid = True

    def __init__(
        self,
        channels: int,
        *,
        order: Order = "cheap",
        embedding: Embedding = "linear",
        normalization: Normalization = "mean",
        fusion: Fusion = "sum",
        spatial_axes: int = 2,
        init: Init = "identity",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, init)
        self.order = choice("order", order, Order)
        self.embedding = choice("embedding", embedding, Embedding)
        self.normalization = choice("normalization", normalization, Normalization)
        self.fusion = choice("fusion", fusion, Fusion)
        self.spatial_axes = choice("spatial_axes", spatial_axes, (1, 2, 3))
        linear, factory = embedding == "linear", factory_of(device, dtype)
        self.a = nn.Linear(channels, channels, bias=False, **factory) if linear else None
        self.b = nn.Linear(channels, channels, bias=False, **factory) if linear else None
        self.v = nn.Linear(channels, channels, bias=False, **factory) if linear else None
        fused = channels if fusion == "sum" else channels * (1 + spatial_axes)
        self.out = PointwiseNorm(fused, channels, bias=False, zero=init == "identity", **factory)
        self.reset_parameters()

    def why_not_in_parts(self) -> str | None:
        """It has no summary."""
        return "along rows and columns it is not a sum over positions"

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """It has no summary."""
        raise ValueError(NO_SUMMARY)

    def _summary(
        self, x: Tensor, spatial: torch.Size, weights: Tensor | None = None, emphasis: Tensor | None = None
    ) -> Summary:
        raise ValueError(NO_SUMMARY)

    def _attend(
        self, x: Tensor, spatial: torch.Size, summary: Summary, weights: Tensor | None = None
    ) -> Tensor:
        raise ValueError(NO_SUMMARY)

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        if weights is not None:
            raise ValueError(NO_SUMMARY)
        if self.fusion == "concat" and len(spatial) != self.spatial_axes:
            raise ValueError(
                f"TESA: x has {len(spatial)} spatial axes; this block was built for "
                f"spatial_axes={self.spatial_axes}: construct it with spatial_axes={len(spatial)}, "
                "or use fusion='sum'"
            )
        layers = (self.a, self.b, self.v)
        flat = ((x if layer is None else projected(layer, x)).transpose(-2, -1) for layer in layers)
        # No unflatten: the older ONNX exporter would write the sizes of the example into the program.
        a, b, v = (t.reshape(*t.shape[:2], *spatial) for t in flat)
        modes = [
            tesa_mode(a, b, v, axis, self.order, self.normalization).flatten(2).transpose(-2, -1)
            for axis in range(1, v.dim())
        ]
        return x + self.out(sum(modes[1:], modes[0]) if self.fusion == "sum" else torch.cat(modes, dim=-1))
