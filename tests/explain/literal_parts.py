"""What every position contributes to every other, in fp64, by sums over pairs as the papers write them."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polynl import EfficientNL, NonLocal, PolyNL

CHANNELS = 4
# With it no ReLU of a concatenation cuts off all that some position gets.
SEED = 13

# Those that mix by their Gram matrix, then those of queries and keys.
MIXING: list[tuple[type, dict[str, Any]]] = [
    (PolyNL, {}),
    (PolyNL, {"form": "direct"}),
    (PolyNL, {"reduction": 2}),
    (NonLocal, {"inner_channels": 3}),
    (NonLocal, {"scale": "inner", "form": "quadratic"}),
    (NonLocal, {"scale": "channels"}),
    (EfficientNL, {"normalization": "none", "bias": False}),
    (EfficientNL, {"normalization": "none", "bias": False, "heads": 2, "key_channels": 6}),
]
ATTENDING: list[tuple[type, dict[str, Any]]] = [
    (NonLocal, {"bias": True}),
    (NonLocal, {"bias": True, "form": "quadratic", "scale": "inner"}),
    (NonLocal, {"norm": "batch"}),
    (NonLocal, {"out_bias": True, "sub_sample": "before"}),
    (NonLocal, {"sub_sample": "after", "norm": "batch", "bias": True}),
    (NonLocal, {"mode": "embedded_gaussian"}),
    (NonLocal, {"mode": "embedded_gaussian", "norm": "batch", "bias": True, "scale": "inner"}),
    (NonLocal, {"mode": "embedded_gaussian", "sub_sample": "after", "out_bias": True}),
    (NonLocal, {"mode": "gaussian", "scale": "channels", "inner_channels": 5}),
    (NonLocal, {"mode": "gaussian", "sub_sample": "before", "bias": True}),
    (NonLocal, {"mode": "concatenation"}),
    (NonLocal, {"mode": "concatenation", "norm": "batch", "bias": True, "sub_sample": "after"}),
    (EfficientNL, {}),
    (EfficientNL, {"bias": False, "heads": 2}),
    (EfficientNL, {"heads": 2, "key_channels": 6, "value_channels": 4}),
    (EfficientNL, {"normalization": "none", "heads": 2}),
]


def built(kind: type, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """The block in eval mode, every parameter and statistic random: zeros would hide mistakes."""
    return randomised(kind(CHANNELS, **options)).to(dtype).eval()


def randomised(block: nn.Module, seed: int = SEED) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*block.named_parameters(), *block.named_buffers()]:
            if name.endswith("running_var"):
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            elif value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.7)
    return block


def feature_map(batch: int, spatial: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        batch, CHANNELS, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).to(dtype)


def literal(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Parts (b, n, m, c) of the keys in what every position gets, and what it has of its own (b, n, c)."""
    block, x = block.double(), x.double()
    by_kind = {PolyNL: _poly_nl, NonLocal: _non_local, EfficientNL: _efficient_nl}[type(block)]
    with torch.no_grad():
        found = [by_kind(block, sample.flatten(1).T, sample.shape[1:]) for sample in x]
    parts, own = zip(*found, strict=True)
    return torch.stack(parts), torch.stack(own)


def _poly_nl(block: Any, x: Tensor, spatial: torch.Size) -> tuple[Tensor, Tensor]:
    """Eq. 7 without its sum over e: Σ_{d,f,h} 1/N w₁(h,d) w₂(f,d) w₃(d,b) x(a,d) x(e,f) x(e,h)."""
    w1, w2, w3 = block.w1.weight.T, block.w2.weight.T, block.w3.weight.T
    value = x if block.w_value is None else x @ block.w_value.weight.T
    parts = torch.einsum("hd,fd,db,ad,ef,eh->aeb", w1, w2, w3, value, x, x) / x.shape[0]
    return block.beta * parts, block.alpha * x


def _non_local(block: Any, x: Tensor, spatial: torch.Size) -> tuple[Tensor, Tensor]:
    def pooled(t: Tensor, when: str) -> Tensor:
        return _max_pooled(t, spatial) if block.sub_sample == when else t

    embedded = block.mode != "gaussian"
    keys = pooled(x, "before")
    theta = _linear(block.theta, x) if embedded else x
    phi = pooled(_linear(block.phi, keys) if embedded else keys, "after")
    g = pooled(_linear(block.g, keys), "after")
    scale = {"none": 1.0, "inner": block.inner_channels**-0.5, "channels": CHANNELS**-0.5}[block.scale]
    rows = []
    for query in theta:
        if block.mode == "concatenation":
            scores = torch.stack([(block.pair @ torch.cat([query, key])).relu() for key in phi]) / len(phi)
        elif block.mode == "dot_product":
            scores = torch.stack([scale * query @ key for key in phi]) / len(phi)
        else:
            scores = torch.stack([(scale * query @ key).exp() for key in phi])
            scores = scores / scores.sum()
        rows.append(torch.stack([weight * value for weight, value in zip(scores, g, strict=True)]))
    return _through_out(block.out, x, torch.stack(rows))


def _efficient_nl(block: Any, x: Tensor, spatial: torch.Size) -> tuple[Tensor, Tensor]:
    q, k, v = (_linear(layer, x).chunk(block.heads, 1) for layer in (block.queries, block.keys, block.values))
    heads = []
    for q_h, k_h, v_h in zip(q, k, v, strict=True):
        if block.normalization == "softmax":
            weights = q_h.softmax(dim=1) @ k_h.softmax(dim=0).T
        else:
            weights = q_h @ k_h.T / len(k_h)
        heads.append(weights[:, :, None] * v_h)
    return _through_out(block.out, x, torch.cat(heads, dim=-1))


def _through_out(out: Any, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """W_out and the scale of the norm are of the parts; the biases, and X itself, of nobody else."""
    parts = attended @ out.weight.T
    own = torch.zeros_like(x) if out.bias is None else out.bias.expand_as(x)
    if out.norm is not None:
        spread = (out.norm.running_var + out.norm.eps).sqrt()
        parts = parts / spread * out.norm.weight
        own = (own - out.norm.running_mean) / spread * out.norm.weight + out.norm.bias
    return parts, x + own


def _linear(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def _max_pooled(x: Tensor, spatial: torch.Size) -> Tensor:
    """The largest in each window of two along every axis; of one where the axis has no more."""
    grid, windows = x.reshape(*spatial, -1), [min(2, extent) for extent in spatial]
    steps = [range(extent // window) for extent, window in zip(spatial, windows, strict=True)]
    cells = []
    for cell in itertools.product(*steps):
        corner = tuple(slice(i * w, (i + 1) * w) for i, w in zip(cell, windows, strict=True))
        cells.append(grid[corner].reshape(-1, x.shape[1]).amax(dim=0))
    return torch.stack(cells)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """To the tolerance times the largest value, by which all are measured."""
    scale = max(expected.abs().max().item(), 1e-30)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)
