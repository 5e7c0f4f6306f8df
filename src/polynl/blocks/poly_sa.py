"""Poly-SA: attention of a ViT by element-wise products, with learned weights of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from polynl.blocks.options import divides, not_negative, positive
from polynl.functional.poly_sa import poly_sa


class PolySA(nn.Module):
    """q ⊙ p₁ · LN(Σ p₂ (k ⊙ v)) in every head, then a projection: tokens (b, n, c) to tokens.

    The cost is that of the projections, 4nc²; no n × n matrix is computed. Known only from the abstract of
    Babiloni et al. (TPAMI 2023) and from a third party's code: neither the authors' code nor their start
    values are public. A choice of polynl: p₁ starts at 1, p₂ at 1/n, and the norm has one weight and one bias
    per channel of a head. It does not start as the identity, nor as the attention it replaces: train it.

    `grid` is the grid of patches that p₁ and p₂ are learned for. On another they are interpolated, except
    those of the first `prefix_tokens`, such as the class token. It must have the same proportions, or be set
    as `input_grid`. Layers are named as in timm's `Attention`.

    >>> layer = PolySA(64, num_heads=4, grid=(7, 7), prefix_tokens=1)
    >>> layer(torch.randn(2, 50, 64)).shape, layer(torch.randn(2, 197, 64)).shape
    (torch.Size([2, 50, 64]), torch.Size([2, 197, 64]))
    """

    def __init__(
        self,
        channels: int,
        *,
        num_heads: int,
        grid: Sequence[int],
        prefix_tokens: int = 0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = positive("channels", channels)
        self.num_heads = divides("num_heads", num_heads, "channels", channels)
        if isinstance(grid, str) or not isinstance(grid, Sequence) or len(grid) != 2:
            raise ValueError(f"grid={grid!r}: expected a height and a width")
        self.grid = positive("grid", grid[0]), positive("grid", grid[1])
        self.prefix_tokens = not_negative("prefix_tokens", prefix_tokens)
        self.input_grid: tuple[int, int] | None = None
        home = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias, **home)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        tokens = self.prefix_tokens + math.prod(self.grid)
        self.p1 = nn.Parameter(torch.ones(num_heads, tokens, **home))
        self.p2 = nn.Parameter(torch.full((num_heads, tokens), 1 / tokens, **home))
        self.pooled_norm = nn.LayerNorm(channels // num_heads, **home)
        self.proj = nn.Linear(channels, channels, **home)
        self.proj_drop = nn.Dropout(proj_drop)

    def extra_repr(self) -> str:
        """The options."""
        sizes = f"num_heads={self.num_heads}, grid={self.grid}, prefix_tokens={self.prefix_tokens}"
        return f"{self.channels}, {sizes}"

    def forward(
        self, x: Float[Tensor, "b n c"], attn_mask: None = None, is_causal: bool = False
    ) -> Float[Tensor, "b n c"]:
        """Tokens, the prefix first; a mask of pairs cannot be used, since pairs are not compared."""
        if attn_mask is not None or is_causal:
            raise ValueError("Poly-SA compares no pairs of tokens: it takes neither attn_mask nor is_causal")
        if x.dim() != 3 or x.shape[-1] != self.channels or x.shape[1] <= self.prefix_tokens:
            raise ValueError(
                f"got a tensor of shape {tuple(x.shape)}; expected tokens (b, n, c) with c = {self.channels} "
                f"and n above {self.prefix_tokens}, the number of prefix tokens"
            )
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        p1, p2 = (self._at(parameter, tokens) for parameter in (self.p1, self.p2))
        norm = self.pooled_norm
        y = poly_sa(self.q_norm(q), self.k_norm(k), v, p1, p2, norm.weight, norm.bias, norm.eps)
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(batch, tokens, -1)))

    def _at(self, values: Float[Tensor, "h m"], tokens: int) -> Float[Tensor, "h n"]:
        """The weights of positions on the grid of the input."""
        grid = self._grid_of(tokens - self.prefix_tokens)
        if grid == self.grid:
            return values
        prefix, learned = values.split([self.prefix_tokens, math.prod(self.grid)], dim=1)
        image = learned.unflatten(1, self.grid).unsqueeze(0)
        resized = F.interpolate(image.float(), grid, mode="bicubic", align_corners=False)
        return torch.cat([prefix, resized[0].flatten(1).to(values.dtype)], dim=1)

    def _grid_of(self, patches: int) -> tuple[int, int]:
        if self.input_grid is not None and math.prod(self.input_grid) == patches:
            return self.input_grid
        if patches == math.prod(self.grid):
            return self.grid
        height = math.isqrt(max(0, patches) * self.grid[0] // self.grid[1])
        width = height * self.grid[1] // self.grid[0]
        if patches < 1 or height * width != patches or height * self.grid[1] != width * self.grid[0]:
            raise ValueError(
                f"{patches} patches do not have the proportions of the grid {self.grid}: set input_grid to "
                "their height and width, or prefix_tokens to the number of those that are not patches "
                f"(now {self.prefix_tokens})"
            )
        return height, width
