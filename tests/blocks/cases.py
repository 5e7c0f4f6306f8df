"""The blocks under contract: the options tried, and what each block is by the literal formulas."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polynl import Block, build_block
from polynl.functional.efficient import efficient_attention_reference
from polynl.functional.latent_gnn import latent_gnn_reference
from polynl.functional.non_local import concatenation_attention_reference, softmax_attention_reference
from polynl.functional.poly_nl import poly_nl_reference
from polynl.functional.polynomial import ccp_reference
from polynl.functional.tesa import tesa_mode_reference

CHANNELS = 8


def poly_nl(block: Any, x: Tensor, spatial: torch.Size) -> Tensor:
    w1, w2, w3 = block.w1.weight.T, block.w2.weight.T, block.w3.weight.T
    w_value = None if block.w_value is None else block.w_value.weight.T
    return block.alpha * x + block.beta * poly_nl_reference(x, w1, w2, w3, w_value)


def non_local(block: Any, x: Tensor, spatial: torch.Size) -> Tensor:
    def pooled(t: Tensor) -> Tensor:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(spatial) - 1]
        return pool(t.T.reshape(1, -1, *spatial), block.pool_size)[0].flatten(1).T

    def same(t: Tensor) -> Tensor:
        return t

    before = pooled if block.sub_sample == "before" else same
    after = pooled if block.sub_sample == "after" else same
    theta = x if block.mode == "gaussian" else linear(block.theta, x)
    phi = after(before(x) if block.mode == "gaussian" else linear(block.phi, before(x)))
    g = after(linear(block.g, before(x)))
    scale = {"none": 1.0, "inner": block.inner_channels**-0.5, "channels": CHANNELS**-0.5}[block.scale]
    if block.mode == "concatenation":
        y = concatenation_attention_reference(theta, phi, g, block.pair)
    elif block.mode == "dot_product":
        y = (scale * theta @ phi.T) @ g / phi.shape[0]
    else:
        y = softmax_attention_reference(theta, phi, g, scale)
    return x + normed(block.out, y)


def efficient_nl(block: Any, x: Tensor, spatial: torch.Size) -> Tensor:
    q, k, v = linear(block.queries, x), linear(block.keys, x), linear(block.values, x)
    return x + normed(block.out, efficient_attention_reference(q, k, v, block.heads, block.normalization))


def latent_gnn(block: Any, x: Tensor, spatial: torch.Size) -> Tensor:
    def unit(t: Tensor) -> Tensor:
        return t / t.norm(dim=1, keepdim=True).clamp_min(1e-12)

    v = unit(normed(block.to_latent, x))
    l = v if block.from_latent is None else unit(normed(block.from_latent, x))  # noqa: E741
    outputs = []
    for kernel in block.kernels:
        from_latent = None if kernel.from_latent is None else normed(kernel.from_latent, l)
        y = latent_gnn_reference(v, normed(kernel.to_latent, v), from_latent)
        outputs.append(normed(kernel.graph, y).relu() if block.graph_conv else y)
    return x + block.gamma * normed(block.out, torch.cat(outputs, dim=1))


def tesa(block: Any, x: Tensor, spatial: torch.Size) -> Tensor:
    def embedded(layer: nn.Linear | None) -> Tensor:
        return (x if layer is None else linear(layer, x)).T.reshape(-1, *spatial)

    a, b, v = embedded(block.a), embedded(block.b), embedded(block.v)
    modes = []
    for axis in range(v.dim()):
        columns = v.numel() // v.shape[axis] if block.normalization == "mean" else 1
        modes.append(tesa_mode_reference(a, b, v, axis).flatten(1).T / columns)
    fused = torch.stack(modes).sum(dim=0) if block.fusion == "sum" else torch.cat(modes, dim=1)
    return x + normed(block.out, fused)


def conv(block: Any, x: Tensor, spatial: torch.Size) -> Tensor:
    """Sum over the kernel's offsets of a shifted map times that offset's matrix."""
    padded = F.pad(x.T.reshape(-1, *spatial), [block.kernel_size // 2] * 2 * len(spatial))
    weight = block.weight.reshape(CHANNELS, CHANNELS, *[block.kernel_size] * len(spatial))
    z = x.new_zeros(CHANNELS, *spatial)
    for offset in torch.cartesian_prod(*[torch.arange(block.kernel_size)] * len(spatial)).reshape(
        -1, len(spatial)
    ):
        window = tuple(slice(int(o), int(o) + size) for o, size in zip(offset, spatial, strict=True))
        z = z + torch.einsum("oi,i...->o...", weight[(..., *offset)], padded[(slice(None), *window)])
    return z.flatten(1).T + (0 if block.offset is None else block.offset)


def polynomial(block: Any, x: Tensor, spatial: torch.Size) -> Tensor:
    return ccp_reference(x, list(block.factors), block.out) + (0 if block.offset is None else block.offset)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def normed(layer: Any, x: Tensor) -> Tensor:
    y, norm = linear(layer.linear, x), layer.norm
    if isinstance(norm, nn.BatchNorm1d):
        y = (y - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    elif isinstance(norm, nn.GroupNorm):
        y = (y - y.mean()) / (y.var(correction=0) + norm.eps).sqrt()
    return y


@dataclass(frozen=True)
class Case:
    """A block with options, its literal formula on one sample, and what holds of it."""

    name: str
    reference: Callable[[Any, Tensor, torch.Size], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    equivariant: bool = True  # permuting the positions of the input permutes those of the output
    axes: tuple[int, ...] = (1, 2, 3)

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Block:
        """The block in eval mode, every parameter and statistic random: zeros would hide mistakes."""
        block = build_block(self.name, CHANNELS, **self.options).to(dtype).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            for name, buffer in block.named_buffers():
                if name.endswith("running_mean"):
                    buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.5)
                elif name.endswith("running_var"):
                    buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
        return block

    def expected(self, block: Block, x: Tensor) -> Tensor:
        """The block on a batch by its literal formula."""
        samples = [self.reference(block, s.flatten(1).T, s.shape[1:]).T.reshape(s.shape) for s in x]
        return torch.stack(samples)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}".replace(" ", "") for k, v in self.options.items())])


DEFAULTS = [
    Case("non_local", non_local),
    Case("tesa", tesa, equivariant=False),
    Case("latent_gnn", latent_gnn, {"latent_dims": 5}),
    Case("efficient_nl", efficient_nl),
    Case("poly_nl", poly_nl),
    Case("polynomial", polynomial),
    Case("conv", conv),
]

VARIANTS = [
    Case("poly_nl", poly_nl, {"form": "direct"}),
    Case("poly_nl", poly_nl, {"form": "gram"}),
    Case("poly_nl", poly_nl, {"form": "direct", "reduction": 2}),
    Case("poly_nl", poly_nl, {"form": "gram", "reduction": 4}),
    Case("non_local", non_local, {"form": "quadratic", "scale": "inner", "norm": "batch"}),
    Case("non_local", non_local, {"mode": "embedded_gaussian", "scale": "channels", "bias": True}),
    Case(
        "non_local", non_local, {"mode": "gaussian", "scale": "inner", "norm": "layer", "inner_channels": 3}
    ),
    Case("non_local", non_local, {"mode": "concatenation", "norm": "batch", "bias": True, "out_bias": False}),
    Case("non_local", non_local, {"mode": "gaussian", "inner_channels": 11}),
    Case("non_local", non_local, {"norm": "layer", "bias": True, "inner_channels": 8}),
    Case(
        "non_local",
        non_local,
        {"mode": "dot_product", "sub_sample": "before", "bias": True},
        equivariant=False,
    ),
    Case("non_local", non_local, {"mode": "embedded_gaussian", "sub_sample": "after"}, equivariant=False),
    Case("non_local", non_local, {"mode": "gaussian", "sub_sample": "after"}, equivariant=False),
    Case("efficient_nl", efficient_nl, {"heads": 2, "key_channels": 6, "value_channels": 4}),
    Case("efficient_nl", efficient_nl, {"heads": 2, "normalization": "none", "bias": False}),
    Case("efficient_nl", efficient_nl, {"normalization": "none"}),
    Case("latent_gnn", latent_gnn, {"latent_dims": (3, 4), "mode": "symmetric", "graph_conv": True}),
    Case("latent_gnn", latent_gnn, {"latent_dims": [3, 5], "inner_channels": 3, "graph_conv": True}),
    Case("tesa", tesa, {"order": "quadratic", "normalization": "none"}, equivariant=False),
    Case("tesa", tesa, {"embedding": "none", "fusion": "concat"}, equivariant=False, axes=(2,)),
    Case("conv", conv, {"kernel_size": 3, "bias": True}, equivariant=False, axes=(2,)),
    Case("conv", conv, {"kernel_size": 3, "spatial_axes": 3}, equivariant=False, axes=(3,)),
    Case("polynomial", polynomial, {"order": 2, "rank": 11, "bias": False}),
]

CASES = DEFAULTS + VARIANTS
