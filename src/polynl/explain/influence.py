"""Who contributes to what a block adds at a position, exactly and without a matrix of all pairs.

Every block with a `mixing` adds Y = X·M(G) with M linear in the Gram matrix G = Σⱼ xⱼxⱼᵀ / N. So position j
contributes xᵢ·M(xⱼxⱼᵀ)/N to Yᵢ, and these contributions add up to Yᵢ. A block of queries and keys contributes
its row of weights times its values. In both cases memory is linear in the number of positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polynl.blocks.base import AttentionBlock, Block, PointwiseNorm
from polynl.functional.gram import gram, mix, project
from polynl.insertion import at_rest

# Numbers in the C×C matrices, or pairs of a query and a key, that are held at a time.
AT_A_TIME = 2**24
Place = Sequence[int] | Tensor


@dataclass(frozen=True)
class Contributions:
    """Z at a place, taken apart: `parts` of the positions, and `own`, which no position's values give."""

    parts: Float[Tensor, "b m c"]
    own: Float[Tensor, "b c"]
    """αX of the place itself, and biases."""
    spatial: torch.Size
    """The shape that the m positions have: of keys, where they are sub-sampled."""

    def total(self) -> Float[Tensor, "b c"]:
        """Z at the place."""
        return self.parts.sum(dim=1) + self.own


def contributions(block: nn.Module, x: Float[Tensor, "b c *spatial"], place: Place) -> Contributions:
    """What every position contributes to a block's output at a place, as vectors.

    `place` is an index into the spatial axes, or weights (b, *spatial) for the mean over several positions.
    Takes N·C³ multiply-adds where there is a `mixing`: see `influence` for maps of single numbers.
    The block is taken in eval mode; of one in half precision the parts are in fp32.

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
    """The share of every position in what a block adds at a place; the shares sum to 1.

    The share of position j in Y at the place is cⱼ·Y / Y·Y, with cⱼ its contribution: negative where it works
    against the others. All zero where the block adds nothing. For blocks with a `mixing` it takes two
    products over the positions: ⟨xᵢM(G), Y⟩ is linear in G, so its gradient Q gives all shares as xⱼᵀQxⱼ.
    They are those of Y alone, so that they are there also while β is zero.
    """
    if not _checked(block).mixes:
        found = contributions(block, x, place)
        total = found.parts.sum(dim=1)
        shares = _ratio((found.parts * total.unsqueeze(1)).sum(-1), total.square().sum(-1))
        return shares.unflatten(-1, found.spatial)
    with _prepared(block, x, place) as (known, folded, weights), torch.enable_grad():
        # Shares do not depend on the scale of X, and at this one cubes neither vanish nor overflow.
        folded = folded / folded.abs().amax(dim=(1, 2), keepdim=True).clamp_min(
            torch.finfo(folded.dtype).tiny
        )
        g = gram(folded).requires_grad_()
        y = mix_rows(mix_rows(weights, folded), known.mixing(g))
        (form,) = torch.autograd.grad(y, g, y.detach())
        shares = (mix(folded, form) * folded).sum(dim=-1) / folded.shape[1]
        return _ratio(shares, y.detach().square().sum(-1)).unflatten(-1, x.shape[2:])


def mix_rows(rows: Float[Tensor, "b n"], maps: Float[Tensor, "b n c"]) -> Float[Tensor, "b c"]:
    """One row times a matrix, for every sample."""
    return torch.bmm(rows.unsqueeze(1), maps).squeeze(1)


def _mixed_parts(
    block: Block, x: Float[Tensor, "b n c"], query: Float[Tensor, "b c"]
) -> Float[Tensor, "b n c"]:
    """query·M(xⱼxⱼᵀ)/N, as many positions at a time as there is room for."""
    b, n, c = x.shape
    size = max(1, AT_A_TIME // (b * c * c))
    parts = []
    for some in x.split(size, dim=1):
        single = some.flatten(0, 1)
        mixing = block.mixing(single.unsqueeze(-1) * single.unsqueeze(-2))
        repeated = query.repeat_interleave(some.shape[1], dim=0)
        parts.append(mix_rows(repeated, mixing).unflatten(0, (b, -1)))
    return torch.cat(parts, dim=1) / n


def _attended_parts(
    block: AttentionBlock, x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"], spatial: torch.Size
) -> Float[Tensor, "b m e"]:
    """The weights of the keys times their values: the block's own attention, differentiated by a value."""
    q, k, v = block.projections(x, spatial)
    asked = weights.any(dim=0).nonzero().squeeze(-1)
    # One channel of values for each head; how Y depends on them is what they are weighted with.
    probe = v.new_zeros(*v.shape[:2], block.heads).requires_grad_()
    rows = torch.zeros_like(probe)
    # Some of the queries at a time: those of a large box have as many pairs with the keys as all have.
    for some in asked.split(max(1, AT_A_TIME // k[..., 0].numel())):
        with torch.enable_grad():
            y = block.attention(q[:, some], k, probe)
        rows += torch.autograd.grad(y, probe, weights[:, some, None].expand_as(y))[0]
    return (v.unflatten(-1, (block.heads, -1)) * rows.unsqueeze(-1)).flatten(2)


def _projected(out: PointwiseNorm, x: Float[Tensor, "b m e"]) -> Float[Tensor, "b m c"]:
    """The linear part of `out`: differences to its constant part would round once for every position."""
    weight = out.linear.weight
    if isinstance(out.norm, _BatchNorm):
        assert out.norm.running_var is not None
        weight = weight * (out.norm.weight / (out.norm.running_var + out.norm.eps).sqrt()).unsqueeze(-1)
    return project(x, weight.mT)


def _ratio(numbers: Float[Tensor, "b n"], whole: Float[Tensor, " b"]) -> Float[Tensor, "b n"]:
    """Zero where the whole is."""
    return torch.where(whole.unsqueeze(-1) > 0, numbers / whole.unsqueeze(-1), 0.0)


def _checked(block: nn.Module) -> Block:
    """The block, if its contributions are known."""
    name = type(block).__name__
    if isinstance(block, Block) and block.mixes:
        return block
    if not isinstance(block, AttentionBlock):
        raise ValueError(
            f"{name} has no influence maps: what it adds is no sum over positions. PolyNL, NonLocal, "
            "EfficientNL and blocks with a mixing have them."
        )
    if isinstance(block.out.norm, nn.GroupNorm):
        raise ValueError(
            f"{name} has no influence maps with norm='layer', which divides by a deviation over all positions"
        )
    return block


@contextmanager
def _prepared(
    block: nn.Module, x: Float[Tensor, "b c *spatial"], place: Place
) -> Iterator[tuple[Block, Float[Tensor, "b n c"], Float[Tensor, "b n"]]]:
    """The block in eval mode, X folded and the weights of its positions, whatever the caller has turned on.

    All is in fp32 at least: parts of a sum over positions are below what half precision resolves.
    """
    known = _checked(block)
    known.check_input(x, any_dtype=True)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(x.device.type, enabled=False))
        stack.enter_context(at_rest(known))
        wide = known if known.dtype.itemsize > 2 else copy.deepcopy(known).float()
        # A tensor of inference mode refuses to take part in a derivative, a copy does not.
        free = x.clone() if x.is_inference() else x.detach()
        yield wide, free.to(wide.dtype).flatten(2).mT, _weights(wide, x, place)


def _weights(block: Block, x: Float[Tensor, "b c *spatial"], place: Place) -> Float[Tensor, "b n"]:
    """Of every position in the place."""
    spatial = x.shape[2:]
    if isinstance(place, Tensor):
        if place.shape != (x.shape[0], *spatial):
            raise ValueError(
                f"place has the shape {tuple(place.shape)}; expected weights {(x.shape[0], *spatial)}"
            )
        return place.to(x.device, block.dtype).flatten(1)
    whole = isinstance(place, Sequence) and all(isinstance(p, int) for p in place)
    if (
        not whole
        or len(place) != len(spatial)
        or not all(0 <= p < s for p, s in zip(place, spatial, strict=True))
    ):
        raise ValueError(f"place={place} is not on the map, which is {tuple(spatial)}")
    weights = x.new_zeros(*spatial, dtype=block.dtype)
    weights[tuple(place)] = 1
    return weights.flatten().expand(x.shape[0], -1)
