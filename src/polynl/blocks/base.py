"""What all blocks share: the contract of `forward`, checked options, and layers on folded maps."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.functional.gram import channels_first, project

T = TypeVar("T")
Init = Literal["identity", "random"]
Norm = Literal["none", "batch", "layer"]
NORMS: tuple[Norm, ...] = ("none", "batch", "layer")


class Block(nn.Module, ABC):
    """A layer (b, c, *spatial) → (b, c, *spatial) with 1, 2 or 3 spatial axes.

    The output has the input's shape, dtype and memory format. Under autocast a block computes in fp32: its
    values grow as the cube of the input or exponentially, beyond what fp16 holds; a result that must return
    to fp16 saturates at that type's largest number and does not overflow.

    With `init="identity"` a new block returns its input bit for bit, so that it can be put into a trained
    network; each block says how, and what receives gradient first. `init="random"` starts it at random.

    A subclass stores every option of its constructor under the option's own name, and `repr` shows them.
    """

    leaves_autocast: ClassVar[bool] = True

    def __init__(self, channels: int, init: Init) -> None:
        super().__init__()
        self.channels = positive("channels", channels)
        self.init = choice("init", init, ("identity", "random"))

    @abstractmethod
    def transform(self, x: Float[Tensor, "b n c"], spatial: torch.Size) -> Float[Tensor, "b n c"]:
        """The block on a folded map; `spatial` is the shape that its n positions had."""

    def forward(self, x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b c *spatial"]:
        """Z of the class's formula."""
        self.check_input(x)
        device = x.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if not (autocast and self.leaves_autocast):
            return self._on_folded(x).to(x.dtype)
        with torch.autocast(device, enabled=False):
            return saturate(self._on_folded(x.to(torch.promote_types(x.dtype, torch.float32))), x.dtype)

    def _on_folded(self, x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b c *spatial"]:
        folded = x.flatten(2).mT
        z = self.transform(folded, x.shape[2:])
        # A transform that turned the layout around is turned back here; usually neither call copies.
        z = z.mT.contiguous() if channels_first(folded) else z.contiguous().mT
        return z.reshape(x.shape)

    def check_input(self, x: Tensor) -> None:
        """Refuse what is not a batch of floating-point maps with this block's channels."""
        expected = f"a batch of maps (b, {self.channels}, *spatial) with 1 to 3 spatial axes"
        if not x.is_floating_point():
            raise TypeError(f"{type(self).__name__}: x has dtype {x.dtype}; expected a floating-point dtype")
        if not 3 <= x.dim() <= 5:
            hint = "; add a batch axis with x[None]" if x.dim() == 2 else ""
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}; expected {expected}{hint}"
            )
        if x.shape[1] != self.channels:
            unbatched = x.dim() == 3 and x.shape[0] == self.channels
            hint = "; add a batch axis with x[None]" if unbatched else ""
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)} and so {x.shape[1]} channels; "
                f"expected {expected}{hint}"
            )

    def extra_repr(self) -> str:
        """The constructor's options and their values."""
        options = list(inspect.signature(type(self).__init__).parameters)[2:]
        return ", ".join([str(self.channels), *(f"{name}={getattr(self, name)!r}" for name in options)])


class Pointwise(nn.Linear):
    """A 1×1 convolution of any rank: the same linear map at each position of a folded map."""

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """See :func:`polynl.functional.project`."""
        return project(x, self.weight.mT, self.bias)


class PointwiseNorm(nn.Module):
    """`Pointwise`, then a normalisation over the channels of the map."""

    def __init__(self, channels: int, out_channels: int, *, bias: bool, norm: Norm) -> None:
        super().__init__()
        self.linear = Pointwise(channels, out_channels, bias=bias)
        self.norm: nn.Module | None = None
        if norm == "batch":
            self.norm = nn.BatchNorm1d(out_channels)
        elif norm == "layer":
            self.norm = nn.GroupNorm(1, out_channels, affine=False)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """The normalised projection."""
        y = self.linear(x)
        if self.norm is None:
            return y
        # Contiguous, since compiled graphs assume it of a norm's output and fail on any other layout.
        return self.norm(y.mT.contiguous()).mT

    def zero(self) -> None:
        """Set the output to zero through as few parameters as do it: the norm's scale, else the weight."""
        scale = self.norm.weight if isinstance(self.norm, nn.BatchNorm1d) else self.linear.weight
        nn.init.zeros_(scale)
        if self.norm is None and self.linear.bias is not None:
            nn.init.zeros_(self.linear.bias)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X in a narrower dtype, values beyond its range becoming its largest finite number."""
    if x.dtype == dtype:
        return x
    limits = torch.finfo(dtype)
    return x.clamp(limits.min, limits.max).to(dtype)


def positive(name: str, value: int) -> int:
    """`value`, if it is a whole number above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}={value!r}: expected a whole number above 0")
    return value


def choice(name: str, value: T, choices: Iterable[T]) -> T:
    """`value`, if it is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    return value


def divides(name: str, value: int, whole_name: str, whole: int) -> int:
    """`value`, if it divides `whole` without a remainder."""
    if whole % positive(name, value):
        raise ValueError(f"{name}={value!r}: expected a divisor of {whole_name}={whole}")
    return value


def width(name: str, value: int | None, default: int) -> int:
    """A number of channels: `value`, or where it is None the default, which is at least 1."""
    return max(1, default) if value is None else positive(name, value)
