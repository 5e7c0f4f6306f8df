"""How much each position contributes to what a block adds at another: exact, without a matrix of all pairs.

Every block with a `mixing` adds Y = X·M(G) with M linear in the Gram matrix G = Σⱼ xⱼxⱼᵀ / N. So position j
contributes xᵢ·M(xⱼxⱼᵀ)/N to Yᵢ, and these contributions sum to Yᵢ. In a block of queries and keys, key j
contributes its attention weight times its value. In both cases memory is linear in the number of positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polynl.blocks.base import AttentionBlock, Block, PointwiseNorm
from polynl.explain.capture import Frame, Images, Spot, block_of, capture, like_images
from polynl.functional.gram import gram, mix, project
from polynl.insertion import at_rest

# How many entries of C×C matrices, or of query-key pairs, are held in memory at a time.
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


def contributions(block: nn.Module, x: Float[Tensor, "b c *spatial"], place: Place) -> Contributions:
    """The vector that every position contributes to a block's output at a place.

    `place` is an index into the spatial axes, or weights (b, *spatial) for the mean over several positions.
    Costs N·C³ multiply-adds if the block has a `mixing`; `influence` is cheaper and gives one number each.
    The block is evaluated in eval mode; if it is in half precision, the parts are in fp32.

    >>> from polynl import NonLocal
    >>> block, x = NonLocal(8, init="random"), torch.randn(1, 8, 5, 5)
    >>> torch.allclose(contributions(block, x, (2, 3)).total(), block(x)[:, :, 2, 3], atol=1e-5)
    True
    """
    with _prepared(block, x, place) as (known, folded, weights):
        query = mix_rows(weights, folded)
        alpha, beta = known.scales()
        if known.mixes:
            return Contributions(beta * _mixed_parts(known, folded, query), alpha * query, x.shape[2:])
        assert isinstance(known, AttentionBlock)
        attended = _attended_parts(known, folded, weights, x.shape[2:])
        constant = known.out(torch.zeros_like(attended[:1, :1])).squeeze(1)
        own = alpha * query + constant * weights.sum(dim=1, keepdim=True)
        return Contributions(_projected(known.out, attended), own, known.keys_of(x.shape[2:]))


def influence(
    block: nn.Module, x: Float[Tensor, "b c *spatial"], place: Place
) -> Float[Tensor, "b *spatial"]:
    """The share of every position in what a block adds at a place; shares sum to 1.

    The share of position j is cⱼ·Y / Y·Y, with cⱼ its contribution to Y at the place; a negative share works
    against the others. If the block adds nothing, all are zero. For blocks with a `mixing` this takes two
    products over the positions: ⟨xᵢM(G), Y⟩ is linear in G, so its gradient Q gives all shares as xⱼᵀQxⱼ.
    Shares are computed from Y without β, so they are defined even while β is zero.
    """
    if not _checked(block).mixes:
        found = contributions(block, x, place)
        total = found.parts.sum(dim=1)
        shares = _ratio((found.parts * total.unsqueeze(1)).sum(-1), total.square().sum(-1))
        return shares.unflatten(-1, found.spatial)
    with _prepared(block, x, place) as (known, folded, weights), torch.enable_grad():
        # Shares do not depend on the scale of X; with this one, cubes neither underflow nor overflow.
        folded = folded / folded.abs().amax(dim=(1, 2), keepdim=True).clamp_min(
            torch.finfo(folded.dtype).tiny
        )
        g = gram(folded).requires_grad_()
        y = mix_rows(mix_rows(weights, folded), known.mixing(g))
        (form,) = torch.autograd.grad(y, g, y.detach())
        shares = (mix(folded, form) * folded).sum(dim=-1) / folded.shape[1]
        return _ratio(shares, y.detach().square().sum(-1)).unflatten(-1, x.shape[2:])


def influence_map(
    model: nn.Module, images: Images, spot: Spot | Sequence[Spot] | Tensor, *, block: str | None = None
) -> Any:
    """The share of every position in what a block adds at a spot of the image: (b, h, w), each summing to 1.

    `spot`: a point x, y or a box left, top, right, bottom in pixels of the image, one for all images or one
    for each; tensors are accepted too, such as the boxes of a detector.
    `images`, `block`: see `feature_norms`. See :func:`polynl.explain.influence` for what a share is. Maps of
    a detector's images come without the padding, which may have a share as well.
    """
    name = block_of(model, block)
    captured = capture(model, images, modules=[name])
    spots = _spots(spot, len(captured.frames))
    x = captured.activations[name].input
    return like_images(images, influence_at(model.get_submodule(name), x, captured.frames, spots))


def influence_maps(model: nn.Module, image: Tensor, *, block: str | None = None) -> Tensor:
    """The maps of all positions of one image (3, h, w): (rows, columns, h, w), the first two of the position.

    Memory is that of the result. As in `influence_map`, a detector's maps come without the padding.
    """
    if image.dim() != 3:
        raise ValueError(f"image has the shape {tuple(image.shape)}; expected (3, h, w)")
    name = block_of(model, block)
    captured = capture(model, image, modules=[name])
    module, x, (frame,) = model.get_submodule(name), captured.activations[name].input, captured.frames
    rows, columns = frame.crop(x).shape[-2:]
    maps = [
        frame.crop(influence(module, x, (row, column))[0]) for row in range(rows) for column in range(columns)
    ]
    return torch.stack(maps).unflatten(0, (rows, columns))


def influence_at(block: nn.Module, x: Tensor, frames: Sequence[Frame], spots: Sequence[Spot]) -> list[Tensor]:
    """For each image, the influence map of its spot, from the captured input of a block."""
    places = torch.zeros_like(x[:, 0])
    for place, frame, spot in zip(places, frames, spots, strict=True):
        inside = place[(..., *frame.cells(spot, x.shape[-2:]))]
        inside.fill_(1.0 / inside.numel())
    shares = influence(block, x, places)
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


def mix_rows(rows: Float[Tensor, "b n"], maps: Float[Tensor, "b n c"]) -> Float[Tensor, "b c"]:
    """One row times a matrix, for each sample."""
    return torch.bmm(rows.unsqueeze(1), maps).squeeze(1)


def _mixed_parts(
    block: Block, x: Float[Tensor, "b n c"], query: Float[Tensor, "b c"]
) -> Float[Tensor, "b n c"]:
    """query·M(xⱼxⱼᵀ)/N, in chunks of positions."""
    b, n, c = x.shape
    size = max(1, CHUNK // (b * c * c))
    parts = []
    for chunk in x.split(size, dim=1):
        single = chunk.flatten(0, 1)
        mixing = block.mixing(single.unsqueeze(-1) * single.unsqueeze(-2))
        repeated = query.repeat_interleave(chunk.shape[1], dim=0)
        parts.append(mix_rows(repeated, mixing).unflatten(0, (b, -1)))
    return torch.cat(parts, dim=1) / n


def _attended_parts(
    block: AttentionBlock, x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"], spatial: torch.Size
) -> Float[Tensor, "b m e"]:
    """The keys' weights times their values; the weights are derivatives of the attention by the values."""
    q, k, v = block.projections(x, spatial)
    queries = weights.any(dim=0).nonzero().squeeze(-1)
    # One channel of values for each head: the derivative of Y with respect to it is the attention weight.
    probe = v.new_zeros(*v.shape[:2], block.heads).requires_grad_()
    rows = torch.zeros_like(probe)
    # In chunks of queries: a box as large as the map would need all pairs of queries and keys.
    for chunk in queries.split(max(1, CHUNK // k[..., 0].numel())):
        with torch.enable_grad():
            y = block.attention(q[:, chunk], k, probe)
        rows += torch.autograd.grad(y, probe, weights[:, chunk, None].expand_as(y))[0]
    return (v.unflatten(-1, (block.heads, -1)) * rows.unsqueeze(-1)).flatten(2)


def _projected(out: PointwiseNorm, x: Float[Tensor, "b m e"]) -> Float[Tensor, "b m c"]:
    """The linear part of `out`; subtracting its constant part instead would round once per position."""
    weight = out.linear.weight
    if isinstance(out.norm, _BatchNorm):
        assert out.norm.running_var is not None
        weight = weight * (out.norm.weight / (out.norm.running_var + out.norm.eps).sqrt()).unsqueeze(-1)
    return project(x, weight.mT)


def _ratio(parts: Float[Tensor, "b n"], total: Float[Tensor, " b"]) -> Float[Tensor, "b n"]:
    """Zero where the total is zero."""
    return torch.where(total.unsqueeze(-1) > 0, parts / total.unsqueeze(-1), 0.0)


def _checked(block: nn.Module) -> Block:
    """The block, or a ValueError if its output is not a sum of contributions."""
    without = f"{type(block).__name__} has no influence maps"
    if isinstance(block, Block) and block.mixes:
        return block
    if not isinstance(block, AttentionBlock):
        raise ValueError(f"{without}: its output is not a sum over positions")
    if isinstance(block.out.norm, nn.GroupNorm):
        raise ValueError(f"{without} with norm='layer', which normalizes over all positions")
    return block


@contextmanager
def _prepared(
    block: nn.Module, x: Float[Tensor, "b c *spatial"], place: Place
) -> Iterator[tuple[Block, Float[Tensor, "b n c"], Float[Tensor, "b n"]]]:
    """The block in eval mode, X folded and the weights of its positions; autocast is off.

    At least fp32: half precision does not resolve single terms of a sum over positions.
    """
    known = _checked(block)
    known.check_input(x, any_dtype=True)
    fp32 = torch.autocast(x.device.type, enabled=False)
    with torch.inference_mode(mode=False), torch.no_grad(), fp32, at_rest(known):
        wide = known if known.dtype.itemsize > 2 else copy.deepcopy(known).float()
        # Autograd cannot use a tensor of inference mode, but it can use a copy.
        free = x.clone() if x.is_inference() else x.detach()
        yield wide, free.to(wide.dtype).flatten(2).mT, _weights(wide, x, place)


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
