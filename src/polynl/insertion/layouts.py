"""Which axis of a tensor holds the channels: what the layers around it say, or else its proportions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# A subclass with a forward of its own may permute its input, as the LayerNorm2d of torchvision does.
CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
CHANNELS_FIRST_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)
OTHER_PLACES = (
    "choose a place where the channels are on axis 1, or insert a module of your own that moves them there "
    "and back, with channels={channels}"
)


class Layouts:
    """The axes on which layers of a model found the channels of tensors, by the shapes of these tensors."""

    def __init__(self) -> None:
        self.axes: dict[torch.Size, set[int]] = {}

    def watch(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook of layers for which `tells_layout`."""
        tensors = [value for value in (*args[:1], output) if isinstance(value, Tensor)]
        for tensor in tensors:
            self.axes.setdefault(tensor.shape, set()).add(_channel_axis(layer, tensor.dim()))

    def problem(self, shape: torch.Size, spatial: torch.Size) -> str | None:
        """Why a tensor of this shape is no map for a block, if it is not; `spatial` is that of the input."""
        last = len(shape) - 1
        axes = self.axes.get(shape) or {last if _looks_channels_last(shape, spatial) else 1}
        if axes == {1}:
            return None
        if 0 in axes:
            return f"got a tensor of shape {tuple(shape)} without a batch axis: pass an example that has one"
        anyway = f"if they are on axis 1 already, pass channels={shape[1]} and no example="
        if axes == {last}:
            layout = f"{channels_last_layout(len(shape))} of shape {tuple(shape)}"
            return f"got what looks like {layout}: {OTHER_PLACES.format(channels=shape[-1])}; {anyway}"
        return (
            f"got a tensor of shape {tuple(shape)}, whose channels are on axis 1 for some layers and on axis "
            f"{last} for others: pass an example of another size, in which these axes differ; {anyway}"
        )


def tells_layout(layer: nn.Module) -> bool:
    """Whether it is known on which axis the layer finds its channels."""
    return isinstance(layer, CONVOLUTIONS + CHANNELS_FIRST_NORMS) or any(
        type(layer).forward is kind.forward for kind in CHANNELS_LAST
    )


def _channel_axis(layer: nn.Module, axes: int) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return axes - len(layer.kernel_size) - 1  # 0 if there is no batch axis
    return 1 if isinstance(layer, CHANNELS_FIRST_NORMS) else axes - 1


def channels_last_layout(axes: int) -> str:
    """What to call a tensor with so many axes whose channels are on the last."""
    names = {3: "tokens (b, n, c)", 4: "a map (b, h, w, c)", 5: "a map (b, d, h, w, c)"}
    return names.get(axes, "a tensor (b, *spatial, c)")


def described(value: Any) -> torch.Size | str:
    """The shape of a tensor; words for anything else."""
    if isinstance(value, Tensor):
        return value.shape
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def _looks_channels_last(shape: torch.Size, spatial: torch.Size) -> bool:
    """Tokens (b, n, c) of an image, or a map that keeps the input's proportions one axis too early."""
    if len(spatial) < 2 or len(shape) != len(spatial) + 2:
        return len(spatial) > 1 and len(shape) == 3
    return proportional(shape[-3:-1], spatial[-2:]) and not proportional(shape[-2:], spatial[-2:])


def proportional(sizes: Sequence[int], spatial: Sequence[int]) -> bool:
    """Whether a map of this height and width can come from such an image: strides keep the proportions."""
    # Strides round each size by up to one, which changes the cross product by up to the sum of both.
    return abs(sizes[0] * spatial[1] - sizes[1] * spatial[0]) <= sum(spatial)
