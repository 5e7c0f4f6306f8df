"""Shared by all blocks: the contract of summarizing and attending, and layers on folded maps."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from polynl.blocks.options import choice, positive
from polynl.blocks.pointwise import PointwiseNorm, owned
from polynl.functional.gram import channels_first, is_tracing
from polynl.functional.summary import Summary, counted

Init = Literal["identity", "random"]
Device = str | int | torch.device | None


class Block(nn.Module, ABC):
    """A layer (b, c, *spatial) → (b, c, *spatial) with 1, 2 or 3 spatial axes.

    A block is a summary of a map, which is a sum over positions, and the use of it at every position:

        S = Σⱼ s(xⱼ),   zᵢ = αxᵢ + β·y(xᵢ, S):   block.attend(x, block.summarize(x))

    Calling the block gives the same, computed in the fastest way. `mask` (b, *spatial) are the weights of
    positions in the sum: booleans, True for those that count, or numbers from 0 to 1. A position of weight 0
    has no effect on any other, whatever it holds. With `context`, another map of any size, the positions of x
    attend to those of the context, and the mask is that of the context.

    The output has the input's shape, dtype and memory format. Under autocast, a block computes in the dtype
    of its parameters, usually fp32: its values grow cubically or exponentially with the input and would
    overflow fp16. A result that is cast back to fp16 saturates at that type's largest number.

    With `init="identity"`, a new block returns its input bit for bit and can be put into a trained network.
    Each block's docstring says how, and which parameters receive gradient first. `init="random"` starts from
    random weights. `device` and `dtype` are those of the parameters, as in torch's layers.

    A subclass stores every other option of its constructor under the option's own name; `repr` shows them.
    """

    leaves_autocast: ClassVar[bool] = True
    adds_contributions: ClassVar[bool] = False
    """Whether y is a sum of what the positions of the summary contribute, so that there is influence."""
    takes_masks: ClassVar[bool] = True
    """Whether positions can be left out of what the others see."""
    uses_grid: bool = False
    """Whether y depends on where positions are, so that a flat map (b, c, n) does not do for (b, c, h, w)."""
    exchange: Callable[[Summary], Summary] | None = None
    """What calling the block does with the summary of its input before it attends to it.

    If x is a part of a map, in a stream or a shard, this adds the summaries of the other parts.
    """

    def __init__(self, channels: int, init: Init) -> None:
        super().__init__()
        self.channels = positive("channels", channels)
        self.init = choice("init", init, Init)

    def reset_parameters(self) -> None:
        """Restore the start values of all parameters and statistics, as if the block were new."""
        for layer in list(self.modules())[1:]:
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()

    # The formulas, on folded maps (b, n, c) whose positions were `spatial`, in the dtype of the parameters.
    # `weights` (b, n) are those of a mask; positions of weight 0 then hold zeros or other finite numbers.

    @abstractmethod
    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every part of a sample's summary; of keys and values, their widths."""

    @abstractmethod
    def _summary(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        weights: Float[Tensor, "b n"] | None = None,
        emphasis: Float[Tensor, "b m"] | None = None,
    ) -> Summary:
        """S. If the block `adds_contributions`, `emphasis` multiplies the summand of every key.

        It leaves what they are divided by as it is, so derivatives by it are what the keys contribute.
        """

    def scales(self) -> tuple[Tensor | float, Tensor | float]:
        """(α, β)."""
        return 1.0, 1.0

    @abstractmethod
    def _attend(
        self,
        x: Float[Tensor, "b n c"],
        spatial: torch.Size,
        summary: Summary,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Z; the weights are for norms over positions. If it `adds_contributions`, `_branch` is y alone."""

    def _transform(
        self, x: Float[Tensor, "b n c"], spatial: torch.Size, weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n c"]:
        """Z from the map's own summary; here the two formulas, where a subclass knows a faster way."""
        return self._attend(x, spatial, self._summary(without(x, weights), spatial, weights), weights)

    # What users call: checks, dtypes and layouts around the formulas.

    def forward(
        self,
        x: Float[Tensor, "b c *spatial"],
        mask: Shaped[Tensor, "b *mask"] | None = None,
        context: Float[Tensor, "b c *context"] | None = None,
    ) -> Float[Tensor, "b c *spatial"]:
        """Z of the class's formula, in the layout of x."""
        if isinstance(x, torch.fx.Proxy):
            return self._recorded(x, mask, context)
        if context is not None:
            return self.attend(x, self._exchanged(self.summarize(context, mask)))
        if mask is not None:
            x = self._without_harm(x, mask)
        if self.exchange is not None:
            if problem := self.why_not_in_parts():
                raise ValueError(f"{type(self).__name__} cannot be computed in parts: {problem}")
            return self.attend(x, self._exchanged(self.summarize(x, mask)))
        weights = None if mask is None else self.mask_weights(x, mask)
        return self._computed(x, lambda x: self._whole(x, weights))

    def why_not_in_parts(self) -> str | None:
        """Why a part that attends to the summary of the whole map does not get what the map gets, if so."""
        for layer in self.modules():
            norm = layer.norm if isinstance(layer, PointwiseNorm) else None
            if isinstance(norm, nn.GroupNorm):
                return "its layer norm is over all positions"
            if isinstance(norm, nn.BatchNorm1d) and (norm.training or norm.running_var is None):
                return "its batch norm takes statistics over all positions: switch to eval mode"
        return None

    def _exchanged(self, summary: Summary) -> Summary:
        return summary if self.exchange is None else self.exchange(summary)

    def _without_harm(self, x: Tensor, mask: Tensor) -> Tensor:
        """X without NaN, and what overflows when it is cubed, at positions of weight 0.

        It would get into gradients even if left out of the sums.
        """
        hidden = (self.mask_weights(x, mask) == 0).view(mask.shape).unsqueeze(1)
        harmless = x.abs() <= torch.finfo(x.dtype).max ** 0.25
        return x.masked_fill(hidden & ~harmless, 0)

    def summarize(
        self, x: Float[Tensor, "b c *spatial"], mask: Shaped[Tensor, "b *spatial"] | None = None
    ) -> Summary:
        """S of a map. The sum of the summaries of parts of a map, which may be empty, is that of the map.

        Sums are in fp32 at least.
        """
        autocast = autocast_is_on(x)
        self.check_input(x, any_dtype=autocast, empty=True)
        weights = None if mask is None else self.mask_weights(x, mask)
        with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():
            return self._summary(without(folded(x.to(self.dtype)), weights), x.shape[2:], weights)

    def attend(self, x: Float[Tensor, "b c *spatial"], summary: Summary) -> Float[Tensor, "b c *spatial"]:
        """Z for every position of x, given the summary of any map: of x, of a larger one, of another.

        Each position by itself, so x may be a part of a map, unless the block has a layer norm.
        """
        self._check_summary(x, summary)
        return self._computed(x, lambda x: unfolded(self._attend(folded(x), x.shape[2:], summary), x))

    def _whole(
        self, x: Float[Tensor, "b c *spatial"], weights: Float[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b c *spatial"]:
        return unfolded(self._transform(folded(x), x.shape[2:], weights), x)

    def _computed(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """`compute(x)` without autocast, in the dtype of the parameters."""
        if not autocast_is_on(x):
            self.check_input(x)
            return owned(self, compute(x))
        self.check_input(x, any_dtype=True)
        if not self.leaves_autocast:
            return owned(self, compute(x).to(x.dtype))
        with torch.autocast(x.device.type, enabled=False):
            return owned(self, saturate(compute(x.to(self.dtype)), x.dtype))

    def _recorded(self, x: torch.fx.Proxy, *others: Any) -> Any:
        """One node of a symbolic trace by torch.fx, which cannot follow what depends on sizes or layouts."""
        name = x.tracer.path_of_module(self)  # type: ignore[attr-defined]
        return x.tracer.create_proxy("call_module", name, (x, *others), {})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        # Its own are found in a fraction of the time that those of its layers take.
        for parameter in self._parameters.values():
            if parameter is not None:
                return parameter.dtype
        for layer in self.modules():
            if isinstance(weight := getattr(layer, "weight", None), Tensor):  # in replicas no parameter
                return weight.dtype
        return next(self.parameters()).dtype

    def check_input(self, x: Tensor, *, any_dtype: bool = False, empty: bool = False) -> None:
        """Raise an error unless x is a batch of floating-point maps with this block's channels and dtype.

        `empty`: whether maps may be without positions.
        """
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: x is a {type(x).__name__}; expected a tensor (b, c, *spatial)")
        # In the common case one expression: for a small map, checks take as long as products.
        dtype, shape = x.dtype, tuple(x.shape)
        if (
            (any_dtype or dtype == self.dtype)
            and dtype.is_floating_point
            and 3 <= len(shape) <= 5
            and shape[1] == self.channels
            and (empty or 0 not in shape[2:])
        ):
            return
        if not dtype.is_floating_point:
            raise TypeError(f"{name}: x has dtype {dtype}; expected a floating-point dtype")
        if dtype != self.dtype and not any_dtype:
            raise TypeError(
                f"{name}: x has dtype {dtype}; expected {self.dtype}, the dtype of the block's parameters: "
                "cast one of them, or use torch.autocast"
            )
        if not 3 <= len(shape) <= 5 or shape[1] != self.channels:
            unbatched = 2 <= len(shape) <= 4 and shape[0] == self.channels
            raise ValueError(
                f"{name}: x has shape {shape}; expected a batch of maps (b, {self.channels}, *spatial) with "
                f"1 to 3 spatial axes{'; add a batch axis with x[None]' if unbatched else ''}"
            )
        raise ValueError(f"{name}: x has shape {shape}, which has no positions; expected at least one")

    def _check_summary(self, x: Tensor, summary: Summary) -> None:
        name = type(self).__name__
        if not isinstance(summary, Summary):
            raise TypeError(f"{name}: summary is a {type(summary).__name__}; expected a polynl.Summary")
        if summary.shapes() != self.summary_shapes():
            raise ValueError(
                f"{name}: the summary is of another block: it has {summary.shapes()}; "
                f"expected {self.summary_shapes()}"
            )
        if x.dim() > 0 and len(summary.count) != len(x):
            raise ValueError(f"{name}: the summary is of a batch of {len(summary.count)}; x has {len(x)}")

    def mask_weights(self, x: Tensor, mask: Tensor) -> Float[Tensor, "b n"]:
        """The mask of a map x as weights of its positions; an error if it does not fit."""
        name = type(self).__name__
        if not isinstance(mask, Tensor):
            raise TypeError(f"{name}: mask is a {type(mask).__name__}; expected a tensor")
        if not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise TypeError(f"{name}: mask has dtype {mask.dtype}; expected torch.bool or floating point")
        expected = (x.shape[0], *x.shape[2:]) if x.dim() > 2 else "(b, *spatial)"
        if mask.shape != expected:
            raise ValueError(
                f"{name}: mask has shape {tuple(mask.shape)}; expected {expected}, a weight per position"
            )
        return mask.to(x.device, self.dtype).flatten(1)

    def extra_repr(self) -> str:
        """The constructor's options and their values."""
        names = (name for name in options_of(type(self)) if name not in ("device", "dtype"))
        options = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return ", ".join([str(self.channels), *(f"{name}={value!r}" for name, value in options.items())])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load older state dicts too, in which α, β and γ had no axis: FSDP needs one to shard."""
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.dim() == 0 and parameter is not None:
                state_dict[prefix + name] = value.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __prepare_scriptable__(self) -> Block:
        """Refuse what torch.jit.script would fail on with an error about a name in an annotation."""
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}: "
            "use torch.compile or torch.export, or for TorchScript torch.jit.trace"
        )


class LocalBlock(Block):
    """A block in which no position sees another, or only its neighbours: its summary is empty."""

    def summary_shapes(self) -> dict[str, tuple[int, ...]]:
        """It has no parts."""
        return {}

    def _summary(
        self, x: Tensor, spatial: torch.Size, weights: Tensor | None = None, emphasis: Tensor | None = None
    ) -> Summary:
        return Summary(counted(x, weights), {})


def factory_of(device: Device, dtype: torch.dtype | None) -> dict[str, Any]:
    """The keyword arguments with which torch makes layers and tensors."""
    return {"device": device, "dtype": dtype}


def options_of(block: type[Block]) -> list[str]:
    """The names of the constructor's keyword arguments, and of those that it passes on by **kwargs."""
    names: dict[str, None] = {}
    for owner in block.__mro__:
        if "__init__" in vars(owner):
            parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[2:]
            names |= {p.name: None for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):
                break
    return list(names)


def layers_of_blocks(model: nn.Module) -> set[nn.Module]:
    """The layers within the model's blocks, not to be hooked without need.

    They work on folded maps, and a block with hooked layers computes in another way and rounds differently.
    """
    return {layer for m in model.modules() if isinstance(m, Block) for layer in [*m.modules()][1:]}


def autocast_is_on(x: Tensor) -> bool:
    """Whether autocast applies to the device of x."""
    if not torch._C._is_any_autocast_enabled():  # the quick answer
        return False
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def folded(x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b n c"]:
    """A view with all positions on one axis."""
    return x.flatten(2).transpose(-2, -1)


def without(x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"] | None) -> Float[Tensor, "b n c"]:
    """X with zeros at positions of weight 0."""
    return x if weights is None else x.masked_fill((weights == 0).unsqueeze(-1), 0)


def unfolded(z: Float[Tensor, "b n c"], x: Float[Tensor, "b c *spatial"]) -> Float[Tensor, "b c *spatial"]:
    """Z in the shape and layout of x."""
    # If the layout of z is another one, this restores that of x; usually neither call copies.
    z = z.transpose(-2, -1).contiguous() if channels_first(folded(x)) else z.contiguous().transpose(-2, -1)
    return laid_out_like(x, z.reshape(x.shape))


def laid_out_like(x: Tensor, z: Tensor) -> Tensor:
    """Z with the strides of x, also along axes of size 1, where strides do not affect the values.

    torch infers the memory format from them: after a map of one position, or a batch of one, a convolution
    would otherwise choose another kernel than without the block, and round differently.
    """
    if torch.compiler.is_compiling() or is_tracing() or z.stride() == x.stride():
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
