"""The layout of a tensor: what the layers around it say, or else its proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polynl.insertion.layouts import CHOICES, Grid, Kind, Layout, Wanted

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
# More tokens than that beyond a grid are not taken for its prefix: a class token, a few registers.
LONGEST_PREFIX = 16
ASK = f"pass layout=, one of {', '.join(CHOICES[1:])}"


class Evidence:
    """What the layers of a model say about the tensors that pass them, by the shapes of these tensors."""

    def __init__(self) -> None:
        self.axes: dict[torch.Size, set[int]] = {}
        """On which axes layers find the channels."""
        self.grids: dict[Grid, None] = {}
        """The spatial shapes of maps, in the order of the pass."""
        self.sequence_first: set[torch.Size] = set()
        """Of tokens (n, b, c)."""
        self.input = torch.Size()
        """The shape of the model's input, or of its first map."""

    def watch(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook of layers for which `tells_layout`."""
        for tensor in (*args[:1], output):
            if isinstance(tensor, Tensor):
                axis = _channel_axis(layer, tensor.dim())
                self.axes.setdefault(tensor.shape, set()).add(axis)
                if not getattr(layer, "batch_first", True):
                    self.sequence_first.add(tensor.shape)
                # Of channels-last tensors, (b, heads, n, c) would be taken for a map.
                if tensor.dim() > 3 and axis == 1:
                    self.input = self.input or tensor.shape
                    self.grids[tuple(tensor.shape[2:])] = None

    def layout(self, shape: torch.Size, wanted: Wanted, hint: int | None) -> Layout:
        """The layout of a tensor of this shape; a ValueError if it cannot be told, or cannot be as wanted.

        `hint` is the prefix that the model itself claims to have; it need not be there yet.
        """
        kind = wanted.kind or self._kind(shape)
        if kind != "tokens":
            return Layout(kind)
        if len(shape) != 3:
            raise ValueError(f"got a tensor of shape {tuple(shape)}: tokens are (b, n, c)")
        return self._tokens(shape[1], wanted.prefix_tokens, wanted.grid, hint)

    def _kind(self, shape: torch.Size) -> Kind:
        last = len(shape) - 1
        axes = self.axes.get(shape) or self._guessed_axes(shape)
        if axes == {1}:
            return "channels_first"
        if 0 in axes:
            raise ValueError(
                f"got a tensor of shape {tuple(shape)} without a batch axis: pass an example that has one"
            )
        if axes != {last}:
            raise ValueError(
                f"got a tensor of shape {tuple(shape)}, whose channels can be on axis 1 and on axis {last}: "
                f"pass an example of another size, in which these axes differ, or {ASK}"
            )
        batch_second = len(self.input) > 3 and shape[1] == self.input[0] != shape[0]
        if last == 2 and (batch_second or shape in self.sequence_first):
            raise ValueError(
                f"got what looks like tokens (n, b, c) of shape {tuple(shape)}: choose a place where the "
                "batch is on axis 0; if it is there already, pass layout='tokens'"
            )
        return "tokens" if last == 2 else "channels_last"

    def _guessed_axes(self, shape: torch.Size) -> set[int]:
        """The axis of the channels where no layer has seen such a tensor; both if it could be either."""
        spatial, last = self.input[2:], len(shape) - 1
        if len(spatial) < 2 or len(shape) == len(spatial) + 2:
            moved = len(spatial) > 1 and proportional(shape[-3:-1], spatial[-2:])
            return {last} if moved and not proportional(shape[-2:], spatial[-2:]) else {1}
        if len(shape) != 3:
            return {1}
        sizes = {math.prod(grid) for grid in self.grids}
        axes = {axis for axis, flat in ((1, shape[2] in sizes), (last, shape[1] in sizes)) if flat}
        return axes or {1, last}

    def _tokens(self, count: int, prefix_tokens: int | None, grid: Grid | None, hint: int | None) -> Layout:
        if grid is not None and prefix_tokens is None:
            prefix_tokens = count - math.prod(grid)
        if prefix_tokens is None:
            prefix_tokens = self._prefix(count, hint)
        positions = count - prefix_tokens
        if prefix_tokens < 0 or positions < 1 or (grid is not None and math.prod(grid) != positions):
            raise ValueError(f"got {count} tokens, which are not {prefix_tokens} before a grid of {grid}")
        return Layout("tokens", prefix_tokens, self._grid(positions) if grid is None else grid)

    def _prefix(self, count: int, hint: int | None) -> int:
        """The tokens that come before a known map; else those claimed, or none if only that leaves a grid."""
        sizes = {math.prod(known) for known in self.grids}
        claimed = [] if hint is None else [hint]
        known = (prefix for prefix in (*claimed, *range(LONGEST_PREFIX + 1)) if count - prefix in sizes)
        gridded = (prefix for prefix in (*claimed, 0) if count > prefix and self._grid(count - prefix))
        return next(known, next(gridded, hint or 0))

    def _grid(self, positions: int) -> Grid | None:
        """A shape that a map of the model has, or else the one with exactly the input's proportions."""
        if known := [grid for grid in self.grids if math.prod(grid) == positions]:
            return known[0]
        if len(self.input) != 4:
            return None
        height, width = self.input[2:]
        rows = math.isqrt(positions * height // width)
        columns = positions // max(rows, 1)
        return (rows, columns) if rows * columns == positions and rows * width == columns * height else None


def tells_layout(layer: nn.Module) -> bool:
    """Whether it is known on which axis the layer finds its channels."""
    return isinstance(layer, CONVOLUTIONS + CHANNELS_FIRST_NORMS) or any(
        type(layer).forward is kind.forward for kind in CHANNELS_LAST
    )


def _channel_axis(layer: nn.Module, axes: int) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return axes - len(layer.kernel_size) - 1  # 0 if there is no batch axis
    return 1 if isinstance(layer, CHANNELS_FIRST_NORMS) else axes - 1


def proportional(sizes: Sequence[int], spatial: Sequence[int]) -> bool:
    """Whether a map of this height and width can come from such an image: strides keep the proportions."""
    # Strides round each size by up to one, which changes the cross product by up to the sum of both.
    return abs(sizes[0] * spatial[1] - sizes[1] * spatial[0]) <= sum(spatial)
