"""Shared by all blocks: the contract of `forward`, checked options, and layers on folded maps."""

import inspect
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, SupportsIndex, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polynl.functional.gram import channels_first, project

T = TypeVar("T")
Init = Literal["identity", "random"]
Norm = Literal["none", "batch", "layer"]


class Block(nn.Module, ABC):
    """A layer (b, c, *spatial) → (b, c, *spatial) with 1, 2 or 3 spatial axes.

    The output has the input's shape, dtype and memory format. Under autocast, a block computes in the dtype
    of its parameters, usually fp32: its values grow cubically or exponentially with the input and would
    overflow fp16. A result that is cast back to fp16 saturates at that type's largest number.

    With `init="identity"`, a new block returns its input bit for bit and can be put into a trained network.
    Each block's docstring says how, and which parameters receive gradient first. `init="random"` starts from
    random weights.

    A subclass stores every option of its constructor under the option's own name; `repr` shows them.
    """

    leaves_autocast: ClassVar[bool] = True
    mixes_with: ClassVar[Mapping[str, object] | None] = None
    """The options with which Y = X·M(G), where G is the Gram matrix of X; None: with no options."""

    def __init__(self, channels: int, init: Init) -> None:
        super().__init__()
        self.channels = positive("channels", channels)
        self.init = choice("init", init, Init)

    @abstractmethod
    def transform(self, x: Float[Tensor, "b n c"], spatial: torch.Size) -> Float[Tensor, "b n c"]:
        """The block on a folded map; `spatial` is the shape of its n positions before folding."""

    def forward(self, x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b c *spatial"]:
        """Z of the class's formula, in the layout of x."""
        device = x.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.check_input(x, any_dtype=autocast)
        if not (autocast and self.leaves_autocast):
            return self._on_folded(x).to(x.dtype)
        with torch.autocast(device, enabled=False):
            return saturate(self._on_folded(x.to(self.dtype)), x.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.parameters()).dtype

    @property
    def mixes(self) -> bool:
        """Whether Y = X·M(G), where G is the Gram matrix of X; then `mixing(G)` is M."""
        needed = self.mixes_with
        return needed is not None and all(getattr(self, name) == value for name, value in needed.items())

    def mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        """M(G), if the block `mixes`."""
        for name, value in (self.mixes_with or {}).items():
            given = getattr(self, name)
            if given != value:
                raise ValueError(
                    f"{type(self).__name__}.mixing: {name}={given!r}; the block is X·M(G) only with {value!r}"
                )
        return self._mixing(gram)

    def _mixing(self, gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
        raise ValueError(f"{type(self).__name__}.mixing: this block is not X·M(G)")

    def scales(self) -> tuple[Tensor | float, Tensor | float]:
        """(α, β), if the block is Z = αX + βY."""
        return 1.0, 1.0

    def _on_folded(self, x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b c *spatial"]:
        folded = x.flatten(2).mT
        z = self.transform(folded, x.shape[2:])
        # If the transform changed the layout, this restores it; usually neither call copies.
        z = z.mT.contiguous() if channels_first(folded) else z.contiguous().mT
        return laid_out_like(x, z.reshape(x.shape))

    def check_input(self, x: Tensor, *, any_dtype: bool = False) -> None:
        """Raise an error unless x is a batch of floating-point maps with this block's channels and dtype."""
        name, shape = type(self).__name__, tuple(x.shape)
        if not x.is_floating_point():
            raise TypeError(f"{name}: x has dtype {x.dtype}; expected a floating-point dtype")
        if x.dtype != self.dtype and not any_dtype:
            raise TypeError(
                f"{name}: x has dtype {x.dtype}; expected {self.dtype}, the dtype of the block's parameters: "
                "cast one of them, or use torch.autocast"
            )
        if not 3 <= x.dim() <= 5 or x.shape[1] != self.channels:
            unbatched = 2 <= x.dim() <= 4 and x.shape[0] == self.channels
            raise ValueError(
                f"{name}: x has shape {shape}; expected a batch of maps (b, {self.channels}, *spatial) with "
                f"1 to 3 spatial axes{'; add a batch axis with x[None]' if unbatched else ''}"
            )
        if 0 in shape[2:]:
            raise ValueError(f"{name}: x has shape {shape}, which has no positions; expected at least one")

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
    """`Pointwise` followed by a norm."""

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
        # Compiled graphs assume that a norm's output is contiguous and fail on any other layout.
        return self.norm(y.mT.contiguous()).mT

    def zero(self) -> None:
        """Make the output zero with as few parameters as possible: the norm's scale, or else the weight."""
        layer = self.norm if isinstance(self.norm, nn.BatchNorm1d) else self.linear
        nn.init.zeros_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


class AttentionBlock(Block):
    """Z = X + norm(Y W_out), where Y weights the values of all positions by queries and keys."""

    heads: int = 1
    out: PointwiseNorm

    @abstractmethod
    def projections(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b m d"], Float[Tensor, "b m e"]]:
        """Queries, keys and values; there are fewer keys than queries if the keys are sub-sampled."""

    @abstractmethod
    def attention(
        self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b m d"], v: Float[Tensor, "b m e"]
    ) -> Float[Tensor, "b n e"]:
        """Y, linear in the values; channels are head-major."""

    def keys_of(self, spatial: torch.Size) -> torch.Size:
        """The spatial shape of the keys."""
        return spatial

    def transform(self, x: Float[Tensor, "b n c"], spatial: torch.Size) -> Float[Tensor, "b n c"]:
        """The class's formula on a folded map."""
        return x + self.out(self.attention(*self.projections(x, spatial)))


def laid_out_like(x: Tensor, z: Tensor) -> Tensor:
    """Z with the strides of x, also along axes of size 1, where strides do not affect the values.

    torch infers the memory format from them: after a map of one position, or a batch of one, a convolution
    would otherwise choose another kernel than without the block, and round differently.
    """
    if torch.compiler.is_compiling() or z.stride() == x.stride():
        return z
    sizes = zip(x.shape, x.stride(), z.stride(), strict=True)
    alike = all(size == 1 or ours == theirs for size, theirs, ours in sizes)
    return z.as_strided(x.shape, x.stride()) if alike else z


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X in a narrower dtype; values beyond its range become its largest finite number."""
    if x.dtype == dtype:
        return x
    limits = torch.finfo(dtype)
    return x.clamp(limits.min, limits.max).to(dtype)


def positive(name: str, value: int) -> int:
    """`value`, if it is a positive integer, Python's or NumPy's."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value <= 0:
        raise ValueError(f"{name}={value!r}: expected a whole number above 0")
    return operator.index(value)


def flag(name: str, value: bool) -> bool:
    """`value`, if it is True or False."""
    return choice(name, value, (True, False))


def choice(name: str, value: T, choices: Any) -> T:
    """`value`, if it is one of `choices`, a Literal or an iterable; 1.0 and True are not 1."""
    choices = get_args(choices) or tuple(choices)
    if not any(type(value) is type(option) and value == option for option in choices):
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    return value


def sizes(name: str, value: int | Sequence[int], expected: str, most: float = math.inf) -> tuple[int, ...]:
    """A tuple of `value`, if it is a positive integer or a sequence of up to `most`."""
    if isinstance(value, SupportsIndex):
        return (positive(name, value),)
    if isinstance(value, str) or not isinstance(value, Sequence) or not 0 < len(value) <= most:
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return tuple(positive(name, size) for size in value)


def divides(name: str, value: int, whole_name: str, whole: int) -> int:
    """`value`, if it divides `whole`."""
    if whole % positive(name, value):
        raise ValueError(f"{name}={value!r}: expected a divisor of {whole_name}={whole}")
    return value


def width(name: str, value: int | None, default: int) -> int:
    """A number of channels: `value`, or `default` (at least 1) if it is None."""
    return max(1, default) if value is None else positive(name, value)
