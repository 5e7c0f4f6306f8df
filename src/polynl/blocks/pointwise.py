"""Layers on folded maps: the same linear map at every position, and norms after it."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from polynl.functional.gram import project, sizes_are_open

Norm = Literal["none", "batch", "layer"]


def projected(layer: nn.Module, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
    """`layer(x)`; of a bare `nn.Linear` in the layout of x. See :func:`polynl.functional.project`."""
    return project(x, layer.weight, layer.bias) if is_bare(layer) else layer(x)  # type: ignore[arg-type]


def is_bare(*layers: nn.Module | None) -> bool:
    """Whether the layers do nothing but multiply by their weights, so that these may be read.

    A layer that is replaced (LoRA), hooked (offloading, counters), sharded, parametrized or quantized has to
    be called: it loads, counts or changes something on the way.
    """
    # Small maps take little longer than this does: no attribute is looked up twice, and the loop comes first.
    for layer in layers:
        if layer is not None:
            own = layer.__dict__
            if (
                type(layer) not in PLAIN_LAYERS
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or "forward" in own
            ):
                return False
            weight = own["_parameters"].get("weight")
            if type(weight) is not nn.Parameter and (weight is None or is_traceable_wrapper_subclass(weight)):
                return False
    return True


def owned(module: nn.Module, y: Tensor) -> Tensor:
    """The module's output y; a copy if it is a view and FSDP shards the module.

    FSDP hooks the backward pass on it and loses the hook when, say, a ReLU changes a view in place.
    """
    return y.clone() if hasattr(type(module), "_get_fsdp_state") and y._is_view() else y


class PointwiseNorm(nn.Module):
    """A linear map followed by a norm. With `zero`, its output is zero at the start.

    It is no `nn.Linear`, and has none: when a host network initialises all of those, a block that starts as
    the identity stays one.
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        *,
        bias: bool,
        norm: Norm = "none",
        zero: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.zero = zero
        self.weight = nn.Parameter(torch.empty(out_channels, channels, **factory))
        self.bias = nn.Parameter(torch.empty(out_channels, **factory)) if bias else None
        self.norm: nn.Module | None = None
        if norm == "batch":
            self.norm = (ZeroBatchNorm if zero else nn.BatchNorm1d)(out_channels, **factory)
        elif norm == "layer":
            self.norm = nn.GroupNorm(1, out_channels, affine=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's initial values; with `zero`, zeros unless the norm's scale is zero."""
        zero = self.zero and not isinstance(self.norm, ZeroBatchNorm)
        bound = 0.0 if zero else self.weight.shape[1] ** -0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """As of torch's layers."""
        out_channels, channels = self.weight.shape
        return f"{channels}, {out_channels}, bias={self.bias is not None}"

    def forward(
        self, x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """The normalised projection; statistics over positions do not include those of weight 0."""
        if sizes_are_open() and isinstance(self.norm, nn.BatchNorm1d) and not self._over_positions():
            # A batch norm of its own is one more pass over the map, and XNNPACK refuses open sizes in it.
            return project(x, *self._weights_with(self.norm))
        return owned(self, self._normalized(project(x, self.weight, self.bias), weights))

    def _weights_with(self, norm: nn.BatchNorm1d) -> tuple[Float[Tensor, "d c"], Float[Tensor, " d"]]:
        """Weight and bias of the linear map and a batch norm with the statistics of training in one."""
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        factor = norm.weight / (variance + norm.eps).sqrt()
        offset = -mean if self.bias is None else self.bias - mean
        return self.weight * factor.unsqueeze(-1), offset * factor + norm.bias

    def _normalized(
        self, y: Float[Tensor, "b n d"], weights: Float[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n d"]:
        if self.norm is None:
            return y
        if weights is None or not self._over_positions():
            # Compiled graphs assume that a norm's output is contiguous and fail on any other layout.
            return self.norm(y.transpose(-2, -1).contiguous()).transpose(-2, -1)
        if isinstance(self.norm, nn.GroupNorm):
            return _masked_layer_norm(y, weights, self.norm.eps)
        counted = weights > 0
        return torch.zeros_like(y).masked_scatter(counted.unsqueeze(-1), self.norm(y[counted]))

    def _over_positions(self) -> bool:
        """Whether the norm computes statistics now, rather than use those of training."""
        norm: Any = self.norm
        return isinstance(norm, nn.GroupNorm) or norm.training or norm.running_var is None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load older state dicts too, in which the linear map was a layer of its own."""
        for name in ("weight", "bias"):
            if f"{prefix}linear.{name}" in state_dict:
                state_dict[prefix + name] = state_dict.pop(f"{prefix}linear.{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


class ZeroBatchNorm(nn.BatchNorm1d):
    """A batch norm whose scale is zero at the start."""

    def reset_parameters(self) -> None:
        """PyTorch's initial values and a zero scale."""
        super().reset_parameters()
        nn.init.zeros_(self.weight)


def _masked_layer_norm(
    x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"], eps: float
) -> Float[Tensor, "b n c"]:
    """X minus its mean, over its standard deviation; both over channels and weighted positions."""
    weights = (weights / weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)).unsqueeze(-1)
    # Filled, because the square of what a position of weight 0 holds may overflow, and 0 · ∞ is NaN.
    kept = x.masked_fill(weights == 0, 0)
    mean = (weights * kept).sum(dim=1).mean(dim=-1)[:, None, None]
    variance = (weights * (kept - mean).square()).sum(dim=1).mean(dim=-1)[:, None, None]
    return (x - mean) / (variance + eps).sqrt()


PLAIN_LAYERS = frozenset((nn.Linear, PointwiseNorm))
