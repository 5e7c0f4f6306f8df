"""How much each position contributes to what a block adds at another: exact, without a matrix of all pairs.

What a block adds is y(xᵢ, S), where the numerators of the summary S are sums over positions. In the blocks
that have influence, y is linear in them: position j contributes y with its summand alone, which is the
derivative of y by a factor of that summand, and the contributions sum to y.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from polynl.blocks.attention import AttentionBlock
from polynl.blocks.base import Block, folded, without
from polynl.explain.capture import Activation, Frame, Images, Spot, block_of, capture, like_images
from polynl.functional.summary import Summary
from polynl.insertion import at_rest

# How many pairs of queries and keys are held in memory at a time.
CHUNK = 2**24
Place = Sequence[int] | Tensor


@dataclass(frozen=True)
class Contributions:
    """Z at a place as a sum: `parts`, one for each position, and `own`, the rest."""

    parts: Float[Tensor, "b m c"]
    own: Float[Tensor, "b c"]
    """αX at the place itself, and biases."""
    spatial: torch.Size
    """The shape of the map of the m positions: smaller than the input's if keys are sub-sampled."""

    def total(self) -> Float[Tensor, "b c"]:
        """Z at the place."""
        return self.parts.sum(dim=1) + self.own


def contributions(
    block: nn.Module,
    x: Float[Tensor, "b c *spatial"],
    place: Place,
    *,
    context: Float[Tensor, "b c *context"] | None = None,
    mask: Shaped[Tensor, "b *mask"] | None = None,
) -> Contributions:
    """The vector that every position contributes to a block's output at a place.

    `place` is an index into the spatial axes, or weights (b, *spatial) for the mean over several positions.
    With `context`, the parts are those of its positions, to which the block attends from x. `mask`: as the
    block takes it.
    Costs C times what `influence` costs, which gives one number each.
    The block is evaluated in eval mode; if it is in half precision, the parts are in fp32.

    >>> from polynl import NonLocal
    >>> block, x = NonLocal(8, init="random"), torch.randn(1, 8, 5, 5)
    >>> torch.allclose(contributions(block, x, (2, 3)).total(), block(x)[:, :, 2, 3], atol=1e-5)
    True
    """
    with _prepared(block, x, place, context, mask) as sums:
        alpha, beta = sums.block.scales()
        parts = torch.stack([sums.derivatives(unit) for unit in sums.unit_vectors()], dim=-1)
        own = alpha * rows_times(sums.weights, sums.x) + beta * sums.constant
        return Contributions(beta * parts, own, sums.spatial)


def influence(
    block: nn.Module,
    x: Float[Tensor, "b c *spatial"],
    place: Place,
    *,
    context: Float[Tensor, "b c *context"] | None = None,
    mask: Shaped[Tensor, "b *mask"] | None = None,
) -> Float[Tensor, "b *spatial"]:
    """The share of every position in what a block adds at a place; shares sum to 1.

    The share of position j is cⱼ·Y / Y·Y, with cⱼ its contribution to Y at the place; a negative share works
    against the others. If the block adds nothing, all are zero. With `context`, the shares are those of its
    positions. `mask`: as the block takes it; positions of weight 0 have no share. One backward pass gives all
    shares, the derivatives of Y·Y by the factors of the summands.
    Shares are computed from Y without β and biases, so they are defined even while β is zero.
    """
    with _prepared(block, x, place, context, mask) as sums:
        return sums.shares(sums.added(sums.summary(sums.ones())))


def influence_in_parts(
    block: nn.Module, x: Float[Tensor, "b c"], parts: Sequence[Any]
) -> Iterator[Float[Tensor, "b *spatial"]]:
    """The shares of all positions in what a block adds at a position x, one part of the map after another.

    As `influence`, for a map that does not fit into memory. The parts are tensors (b, c, *spatial), or a
    sequence that makes them when it is asked: twice for each. Where keys are sub-sampled, cut the map between
    their windows.
    """
    query = x[:, :, None]
    place = torch.ones_like(query[:, 0])
    summaries = []
    for part in parts:
        with _prepared(block, query, place, part, None) as sums:
            summaries.append(sums.summary(sums.ones()))
            last = sums
    y = last.added(sum(summaries[1:], summaries[0]))
    for number, part in enumerate(parts):
        rest = summaries[:number] + summaries[number + 1 :]
        with _prepared(block, query, place, part, None) as sums:
            shares = replace(sums, others=sum(rest[1:], rest[0]) if rest else None).shares(y)
        yield shares  # out of the context, in which gradients are off


@dataclass(frozen=True)
class Sums:
    """A block whose Y is the sum of its contributions, and a place in a map that it attends from."""

    block: Any
    """A `Block` that `adds_contributions`."""
    constant: Float[Tensor, "b c"]
    """What the block adds at the place besides contributions: its biases."""
    x: Float[Tensor, "b n c"]
    weights: Float[Tensor, "b n"]
    """Of the positions of x in the place."""
    keys: Float[Tensor, "b k c"]
    """The map that it attends to."""
    keys_spatial: torch.Size
    keys_weights: Float[Tensor, "b k"] | None = None
    """Those of a mask."""
    others: Summary | None = None
    """Of the other parts of the map attended to, if the keys are a part of it."""

    @property
    def spatial(self) -> torch.Size:
        """The shape of the map of contributions."""
        block, spatial = self.block, self.keys_spatial
        return block.keys_of(spatial) if isinstance(block, AttentionBlock) else spatial

    def ones(self) -> Float[Tensor, "b m"]:
        """A factor for every summand."""
        return self.x.new_ones(len(self.x), self.spatial.numel())

    def unit_vectors(self) -> Iterator[Float[Tensor, "b c"]]:
        """One for each channel."""
        for channel in range(self.x.shape[-1]):
            unit = torch.zeros_like(self.x[:, 0])
            unit[:, channel] = 1
            yield unit

    def summary(self, factors: Float[Tensor, "b m"]) -> Summary:
        """Of the map attended to, with its summands times the factors."""
        summary = self.block._summary(self.keys, self.keys_spatial, self.keys_weights, factors)
        return summary if self.others is None else self.others + summary

    def added(self, summary: Summary) -> Float[Tensor, "b c"]:
        """Y at the place."""
        chunks = (self._added(summary, chunk) for chunk in self._chunks())
        return sum(chunks, torch.zeros_like(self.x[:, 0]))

    def derivatives(self, direction: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """Of Y·direction at the place, by the factors of the summands."""
        found = torch.zeros_like(self.ones())
        for chunk in self._chunks():
            with torch.enable_grad():
                factors = self.ones().requires_grad_()
                y = self._added(self.summary(factors), chunk)
            found += torch.autograd.grad(y, factors, direction)[0]
        return found

    def shares(self, y: Float[Tensor, "b c"]) -> Float[Tensor, "b *spatial"]:
        """Of every position in Y at the place."""
        # Of unit size, because squares of a Y that is cubic soon underflow or overflow.
        size = y.abs().amax(dim=1, keepdim=True)
        direction = y / size.masked_fill(size == 0, 1)
        shares, total = self.derivatives(direction), (y * direction).sum(dim=1, keepdim=True)
        return torch.where(total > 0, shares / total, 0.0).unflatten(1, self.spatial)

    def _added(self, summary: Summary, chunk: Tensor) -> Float[Tensor, "b c"]:
        return rows_times(self.weights[:, chunk], self.block._branch(self.x[:, chunk], summary))

    def _chunks(self) -> Sequence[Tensor]:
        """The positions of the place, few enough that their pairs with all keys can be held in memory."""
        place = self.weights.any(dim=0).nonzero().squeeze(-1)
        return place.split(max(1, CHUNK // max(1, self.ones().numel())))


def influence_map(
    model: nn.Module, images: Images, spot: Spot | Sequence[Spot] | Tensor, *, block: str | None = None
) -> Any:
    """The share of every position in what a block adds at a spot of the image: (b, h, w), each summing to 1.

    `spot`: a point x, y or a box left, top, right, bottom in pixels of the image, one for all images or one
    for each; tensors are accepted too, such as the boxes of a detector.
    `images`, `block`: see `feature_norms`. See :func:`polynl.explain.influence` for what a share is. Maps of
    a detector's images come without the padding, which has a share as well unless the block ignores it.
    """
    name = block_of(model, block)
    captured = capture(model, images, modules=[name])
    spots = _spots(spot, len(captured.frames))
    activation = captured.activations[name]
    return like_images(images, influence_at(model.get_submodule(name), activation, captured.frames, spots))


def influence_maps(model: nn.Module, image: Tensor, *, block: str | None = None) -> Tensor:
    """The maps of all positions of one image (3, h, w): (rows, columns, h, w), the first two of the position.

    Memory is that of the result. As in `influence_map`, a detector's maps come without the padding.
    """
    if image.dim() != 3:
        raise ValueError(f"image has the shape {tuple(image.shape)}; expected (3, h, w)")
    name = block_of(model, block)
    captured = capture(model, image, modules=[name])
    module, seen, (frame,) = model.get_submodule(name), captured.activations[name], captured.frames
    rows, columns = frame.crop(seen.input).shape[-2:]
    maps = [
        frame.crop(influence(module, seen.input, (row, column), mask=seen.mask)[0])
        for row in range(rows)
        for column in range(columns)
    ]
    return torch.stack(maps).unflatten(0, (rows, columns))


def influence_at(
    block: nn.Module, seen: Activation, frames: Sequence[Frame], spots: Sequence[Spot]
) -> list[Tensor]:
    """For each image, the influence map of its spot, from what a block got."""
    x = seen.input
    places = torch.zeros_like(x[:, 0])
    for place, frame, spot in zip(places, frames, spots, strict=True):
        inside = place[(..., *frame.cells(spot, x.shape[-2:]))]
        inside.fill_(1.0 / inside.numel())
    shares = influence(block, x, places, mask=seen.mask)
    return [frame.crop(share) for share, frame in zip(shares, frames, strict=True)]


def _spots(spot: Spot | Sequence[Spot] | Tensor, images: int) -> Sequence[Spot]:
    given: list[Any] = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in spot]
    each = len(given) == 0 or isinstance(given[0], Sequence)
    spots: Any = [tuple(entry) for entry in given] if each else [tuple(given)] * images
    if len(spots) != images or any(len(entry) not in (2, 4) for entry in spots):
        raise ValueError(
            f"spot={spot}: expected x, y or left, top, right, bottom, for all or for each of {images} images"
        )
    return spots


def rows_times(rows: Float[Tensor, "b n"], maps: Float[Tensor, "b n c"]) -> Float[Tensor, "b c"]:
    """One row times a matrix, for each sample."""
    return torch.bmm(rows.unsqueeze(1), maps).squeeze(1)


def check_contributions(block: nn.Module) -> Block:
    """The block, or a ValueError if its output is not a sum of contributions."""
    without = f"{type(block).__name__} has no influence maps"
    if not (isinstance(block, Block) and block.adds_contributions):
        raise ValueError(f"{without}: its output is not a sum over positions")
    if isinstance(block, AttentionBlock) and isinstance(block.out.norm, nn.GroupNorm):
        raise ValueError(f"{without} with norm='layer', which normalizes over all positions")
    return block


@contextmanager
def _prepared(
    block: nn.Module,
    x: Float[Tensor, "b c *spatial"],
    place: Place,
    context: Float[Tensor, "b c *context"] | None,
    mask: Shaped[Tensor, "b *mask"] | None,
) -> Iterator[Sums]:
    """The block in eval mode, the maps folded and the weights of the place; autocast is off.

    At least fp32: half precision does not resolve single terms of a sum over positions.
    """
    known = check_contributions(block)
    keys = x if context is None else context
    for given in (x, keys):
        known.check_input(given, any_dtype=True)
    if len(keys) != len(x):
        raise ValueError(f"context is a batch of {len(keys)}; x has {len(x)}")
    fp32 = torch.autocast(x.device.type, enabled=False)
    with torch.inference_mode(mode=False), torch.no_grad(), fp32, at_rest(known):
        wide = known if known.dtype.itemsize > 2 else copy.deepcopy(known).float()
        weights = _weights(wide, x, place)
        constant, linear = _constant_and_linear(wide)
        # Autograd cannot use a tensor of inference mode, but it can use a copy.
        query, key = (
            folded((given.clone() if given.is_inference() else given.detach()).to(wide.dtype))
            for given in (x, keys)
        )
        masked = None if mask is None else wide.mask_weights(keys, mask)
        constant = constant * weights.sum(dim=1, keepdim=True)
        yield Sums(linear, constant, query, weights, without(key, masked), keys.shape[2:], masked)


def _constant_and_linear(block: Block) -> tuple[Float[Tensor, "1 c"], Block]:
    """What the block adds if it attends to zeros, and a copy of it that then adds nothing.

    Subtracting the constant instead would round off contributions that are small beside it.
    """
    if not isinstance(block, AttentionBlock):
        return torch.zeros(1, 1, dtype=block.dtype, device=next(block.parameters()).device), block
    linear = copy.deepcopy(block)
    nothing = block.out.weight.new_zeros(1, 1, block.out.weight.shape[1])
    constant = block.out(nothing).squeeze(1)
    for layer in linear.out.modules():
        for name in ("bias", "running_mean"):
            if getattr(layer, name, None) is not None:
                getattr(layer, name).zero_()
    return constant, linear


def _weights(block: Block, x: Float[Tensor, "b c *spatial"], place: Place) -> Float[Tensor, "b n"]:
    """The weight of every position in the place."""
    b, spatial = x.shape[0], x.shape[2:]
    if isinstance(place, Tensor):
        if place.shape != (b, *spatial):
            raise ValueError(f"place has the shape {tuple(place.shape)}; expected weights {(b, *spatial)}")
        return place.to(x.device, block.dtype).flatten(1)
    indices = isinstance(place, Sequence) and len(place) == len(spatial)
    if not indices or not all(
        isinstance(p, int) and 0 <= p < size for p, size in zip(place, spatial, strict=True)
    ):
        raise ValueError(f"place={place} is not on the map, which is {tuple(spatial)}")
    weights = x.new_zeros(*spatial, dtype=block.dtype)
    weights[tuple(place)] = 1
    return weights.flatten().expand(b, -1)
