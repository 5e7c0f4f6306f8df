"""The blocks under contract: the options tried, and what each block is by the literal formulas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polynl import Block, Summary, build_block
from polynl.functional.efficient import efficient_attention_reference
from polynl.functional.gates import (
    global_context_reference,
    response_norm_reference,
    squeeze_excite_reference,
)
from polynl.functional.latent_gnn import latent_gnn_reference
from polynl.functional.non_local import concatenation_attention_reference, softmax_attention_reference
from polynl.functional.poly_nl import poly_nl_reference
from polynl.functional.polynomial import ccp_reference
from polynl.functional.products import hydra_reference, separable_reference
from polynl.functional.relu_linear import relu_linear_reference
from polynl.functional.tesa import tesa_mode_reference
from polynl.functional.xca import xca_reference

CHANNELS = 8


def poly_nl(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    w1, w2, w3 = block.w1.weight.T, block.w2.weight.T, block.w3.weight.T
    w_value = None if block.w_value is None else block.w_value.weight.T
    if y is x:
        return block.alpha * x + block.beta * poly_nl_reference(x, w1, w2, w3, w_value)
    pooled = ((y @ w1) * (y @ w2)).sum(dim=0) / len(y)
    return block.alpha * x + block.beta * (pooled * (x if w_value is None else x @ w_value)) @ w3


def non_local(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    def pooled(t: Tensor) -> Tensor:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(y_spatial) - 1]
        return pool(t.T.reshape(1, -1, *y_spatial), block.pool_size)[0].flatten(1).T

    def same(t: Tensor) -> Tensor:
        return t

    before = pooled if block.sub_sample == "before" else same
    after = pooled if block.sub_sample == "after" else same
    theta = x if block.mode == "gaussian" else linear(block.theta, x)
    phi = after(before(y) if block.mode == "gaussian" else linear(block.phi, before(y)))
    g = after(linear(block.g, before(y)))
    scale = {"none": 1.0, "inner": block.inner_channels**-0.5, "channels": CHANNELS**-0.5}[block.scale]
    if block.mode == "concatenation":
        attended = concatenation_attention_reference(theta, phi, g, block.pair)
    elif block.mode == "dot_product":
        attended = (scale * theta @ phi.T) @ g / phi.shape[0]
    else:
        attended = softmax_attention_reference(theta, phi, g, scale)
    return x + normed(block.out, attended)


def efficient_nl(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    q, k, v = linear(block.queries, x), linear(block.keys, y), linear(block.values, y)
    return x + normed(block.out, efficient_attention_reference(q, k, v, block.heads, block.normalization))


def latent_gnn(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    def unit(t: Tensor) -> Tensor:
        return t / t.norm(dim=1, keepdim=True).clamp_min(1e-12)

    v = unit(normed(block.to_latent, y))
    l = unit(normed(block.to_latent if block.from_latent is None else block.from_latent, x))  # noqa: E741
    outputs = []
    for kernel in block.kernels:
        to_latent = normed(kernel.to_latent, v)
        if kernel.from_latent is not None:
            attended = latent_gnn_reference(v, to_latent, normed(kernel.from_latent, l))
        elif y is x:
            attended = latent_gnn_reference(v, to_latent)
        else:
            nodes = unit(to_latent.relu()).T @ v
            mixed = (unit(nodes) @ unit(nodes).T).softmax(dim=1) @ nodes
            attended = unit(normed(kernel.to_latent, l).relu()) @ mixed
        outputs.append(normed(kernel.graph, attended).relu() if block.graph_conv else attended)
    return x + block.gamma * normed(block.out, torch.cat(outputs, dim=1))


def tesa(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    def embedded(layer: nn.Linear | None) -> Tensor:
        return (x if layer is None else linear(layer, x)).T.reshape(-1, *spatial)

    a, b, v = embedded(block.a), embedded(block.b), embedded(block.v)
    modes = []
    for axis in range(v.dim()):
        columns = v.numel() // v.shape[axis] if block.normalization == "mean" else 1
        modes.append(tesa_mode_reference(a, b, v, axis).flatten(1).T / columns)
    fused = torch.stack(modes).sum(dim=0) if block.fusion == "sum" else torch.cat(modes, dim=1)
    return x + normed(block.out, fused)


def conv(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    """Sum over the kernel's offsets of a shifted map times that offset's matrix."""
    padded = F.pad(x.T.reshape(-1, *spatial), [block.kernel_size // 2] * 2 * len(spatial))
    weight = block.weight.reshape(CHANNELS, CHANNELS, *[block.kernel_size] * len(spatial))
    z = x.new_zeros(CHANNELS, *spatial)
    for offset in torch.cartesian_prod(*[torch.arange(block.kernel_size)] * len(spatial)).reshape(
        -1, len(spatial)
    ):
        window = tuple(slice(int(o), int(o) + size) for o, size in zip(offset, spatial, strict=True))
        z = z + torch.einsum("oi,i...->o...", weight[(..., *offset)], padded[(slice(None), *window)])
    return z.flatten(1).T + (0 if block.offset is None else block.offset) + (x if block.residual else 0)


def xca(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    q, k, v = linear(block.q, y), linear(block.k, y), linear(block.v, x)
    return x + normed(block.out, xca_reference(q, k, v, block.temperature))


def relu_linear(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    q, k, v = linear(block.q, x), linear(block.k, y), linear(block.v, y)
    return x + normed(block.out, relu_linear_reference(q, k, v, block.heads))


def separable(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    scores, keys, values = linear(block.scores, y), linear(block.keys, y), linear(block.values, x)
    return x + normed(block.out, separable_reference(scores, keys, values))


def hydra(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    q, k, v = linear(block.query, x), linear(block.key, y), linear(block.value, y)
    return x + normed(block.out, hydra_reference(q, k, v, block.normalization))


def se(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    squeeze, excite = partial(linear, block.squeeze), partial(linear, block.out)
    return squeeze_excite_reference(x, y, squeeze, excite, block.activation, block.gate)


def global_context(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    def transformed(layers: Any) -> Tensor:
        hidden = linear(layers.squeeze, context)
        hidden = (hidden - hidden.mean()) / (hidden.var(correction=0) + 1e-6).sqrt()
        return linear(layers.out, (hidden * layers.norm.weight + layers.norm.bias).clamp_min(0))

    soft = block.pooling == "softmax"
    context = global_context_reference(y, linear(block.scores, y)[:, 0]) if soft else y.sum(dim=0) / len(y)
    scaled = x if block.fusion == "add" else x * 2 / (1 + torch.exp(-transformed(block.scale)))
    return scaled if block.fusion == "scale" else scaled + transformed(block.add)


def grn(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    return response_norm_reference(x, y, block.weight, block.bias)


def polynomial(block: Any, x: Tensor, spatial: torch.Size, y: Tensor, y_spatial: torch.Size) -> Tensor:
    return ccp_reference(x, list(block.factors), block.out) + (0 if block.offset is None else block.offset)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def normed(layer: Any, x: Tensor) -> Tensor:
    y, norm = linear(layer, x), layer.norm
    if isinstance(norm, nn.BatchNorm1d):
        y = (y - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    elif isinstance(norm, nn.GroupNorm):
        y = (y - y.mean()) / (y.var(correction=0) + norm.eps).sqrt()
    return y


@dataclass(frozen=True)
class Case:
    """A block with options, its literal formula on one sample, and what holds of it."""

    name: str
    reference: Callable[[Any, Tensor, torch.Size, Tensor, torch.Size], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    equivariant: bool = True  # permuting the positions of the input permutes those of the output
    axes: tuple[int, ...] = (1, 2, 3)

    @property
    def pointwise(self) -> bool:
        """Whether positions that attend do not see each other: no norm over positions, no neighbours."""
        return self.options.get("norm") != "layer" and self.options.get("kernel_size") != 3

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

    def expected(self, block: Block, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The block on a batch by its literal formula, attending to itself or to another map."""
        samples = []
        for s, other in zip(x, x if context is None else context, strict=True):
            folded = s.flatten(1).T
            keys = folded if context is None else other.flatten(1).T
            samples.append(
                self.reference(block, folded, s.shape[1:], keys, other.shape[1:]).T.reshape(s.shape)
            )
        return torch.stack(samples)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}".replace(" ", "") for k, v in self.options.items())])


DEFAULTS = [
    Case("non_local", non_local),
    Case("tesa", tesa, equivariant=False),
    Case("latent_gnn", latent_gnn, {"latent_dims": 5}),
    Case("efficient_nl", efficient_nl),
    Case("poly_nl", poly_nl),
    Case("xca", xca),
    Case("relu_linear", relu_linear),
    Case("separable", separable),
    Case("hydra", hydra),
    Case("se", se),
    Case("global_context", global_context),
    Case("grn", grn),
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
    Case(
        "latent_gnn",
        latent_gnn,
        # With fewer channels, the ReLU of the graph convolution cuts everything off.
        {"latent_dims": (3, 4), "inner_channels": 4, "mode": "symmetric", "graph_conv": True},
    ),
    Case("latent_gnn", latent_gnn, {"latent_dims": [3, 5], "inner_channels": 3, "graph_conv": True}),
    Case("tesa", tesa, {"order": "quadratic", "normalization": "none"}, equivariant=False),
    Case("tesa", tesa, {"embedding": "none", "fusion": "concat"}, equivariant=False, axes=(2,)),
    Case("conv", conv, {"residual": True}),
    Case("conv", conv, {"kernel_size": 3, "bias": True, "residual": True}, equivariant=False, axes=(2,)),
    Case("conv", conv, {"kernel_size": 3, "spatial_axes": 3}, equivariant=False, axes=(3,)),
    Case("polynomial", polynomial, {"order": 2, "rank": 11, "bias": False}),
    Case("xca", xca, {"heads": 2, "bias": True}),
    Case("relu_linear", relu_linear, {"heads": 2, "inner_channels": 4, "norm": "batch", "bias": True}),
    Case("separable", separable, {"inner_channels": 3, "bias": False}),
    Case("hydra", hydra, {"inner_channels": 5, "normalization": "none", "bias": False}),
    Case("se", se, {"inner_channels": 3, "activation": "silu"}),
    Case("global_context", global_context, {"fusion": "both", "pooling": "mean", "inner_channels": 5}),
]

CASES = DEFAULTS + VARIANTS
SUMMARIZING = [case for case in CASES if case.name != "tesa"]


def image(case: Case, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    """A random map (b, c, h, w), or (b, c, 3, h, w) for a case that takes only those."""
    if 2 not in case.axes:
        shape = (*shape[:2], 3, *shape[2:])
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """To the tolerance times the largest value, by which all are measured."""
    scale = max(1.0, expected.detach().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def with_gradients(
    block: Block, compute: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor | float = 1.0
) -> list[Tensor]:
    """An output, and the gradients of a random sum of it by x and all parameters.

    `weights` (b, 1, *spatial) are those of the output's positions in the sum.
    """
    x = x.detach().clone().requires_grad_()
    z = compute(x)
    cotangent = weights * torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(7))
    inputs = [x, *block.parameters()]
    return [z, *torch.autograd.grad(z, inputs, cotangent, materialize_grads=True)]


def assert_all_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs, tolerance)


def tensors_of(summary: Summary) -> list[Tensor]:
    """Its count and its parts, in the order of their names."""
    return [summary.count, *(summary.parts[name] for name in sorted(summary.parts))]
