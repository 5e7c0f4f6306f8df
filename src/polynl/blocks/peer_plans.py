"""What the modules of other libraries compute, from the keys and shapes of their state dicts.

Each peer is one function from a state dict, the name of its output layer and the options that the state dict
does not show to a :class:`Plan`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from polynl.blocks.base import Block
from polynl.blocks.efficient import EfficientNL
from polynl.blocks.global_context import GlobalContext
from polynl.blocks.grn import GlobalResponseNorm
from polynl.blocks.hydra import HydraAttention
from polynl.blocks.latent_gnn import LatentGNN
from polynl.blocks.latent_gnn import Mode as LatentMode
from polynl.blocks.non_local import Mode, NonLocal
from polynl.blocks.options import choice, divides, flag
from polynl.blocks.relu_linear import ReLULinearAttention
from polynl.blocks.se import SqueezeExcite
from polynl.blocks.separable import SeparableAttention
from polynl.blocks.xca import XCA
from polynl.functional.gates import Activation

T = TypeVar("T")
State = dict[str, Tensor]
Options = dict[str, Any]


class Plan(NamedTuple):
    """The block that computes what a peer does, and where the peer keeps the block's parameters.

    `layers` maps the names of the block's layers, and of the parameters it holds itself, to the peer's. It
    may list more than the block has. Where the peer has one layer for several of the block's, `rows` has the
    output channels that are each one's.
    """

    block: type[Block]
    options: Options
    layers: dict[str, str]
    rows: dict[str, Tensor] | None = None


def mmcv(
    state: State, out: str, *, mode: str | None = None, sub_sample: bool | None = None, use_scale: bool = True
) -> Plan:
    """NonLocal1d, 2d and 3d of mmcv."""
    layers, options = _pooled_after(state, out, ".conv", mode, sub_sample)
    layers |= {"out.norm": "conv_out.bn", "pair": "concat_project.conv.weight"}
    normed = _has(state, "conv_out.bn")
    scaled = flag("use_scale", use_scale) and options["mode"] == "embedded_gaussian"
    options |= {"norm": "batch" if normed else "none", "scale": "inner" if scaled else "none"}
    return _non_local(state, layers, options, out_bias=not normed)


def non_local_pytorch(
    state: State, out: str, *, mode: str | None = None, sub_sample: bool | None = None
) -> Plan:
    """The blocks of AlexHex7/Non-local_pytorch."""
    layers, options = _pooled_after(state, out, "", mode, sub_sample)
    layers |= {"out.norm": "W.1", "pair": "concat_project.0.weight"}
    return _non_local(state, layers, options | {"norm": "batch" if out == "W.0" else "none"})


def timm(state: State, out: str, *, use_scale: bool = True) -> Plan:
    """NonLocalAttn of timm."""
    layers = {"theta": "t", "phi": "p", "g": "g", "out": out, "out.norm": "norm"}
    scale = "channels" if flag("use_scale", use_scale) else "none"
    return _non_local(state, layers, {"mode": "embedded_gaussian", "norm": "batch", "scale": scale})


def slowfast(
    state: State,
    out: str,
    *,
    instantiation: str = "softmax",
    pool_size: Sequence[int] | None = None,
    norm_type: str | None = None,
) -> Plan:
    """Nonlocal of SlowFast."""
    norm = "bn" if _has(state, "bn") else "norm"
    layers = {"theta": "conv_theta", "phi": "conv_phi", "g": "conv_g", "out": out, "out.norm": norm}
    norms = {"batchnorm": "batch", "layernorm": "layer", "none": "none"}
    possible = ("batchnorm",) if _has(state, norm) else ("none", "layernorm")
    options: Options = {"norm": norms[_read("norm_type", norm_type, norms, possible)]}
    softmax = choice("instantiation", instantiation, ("softmax", "dot_product")) == "softmax"
    options |= {"mode": "embedded_gaussian", "scale": "inner"} if softmax else {"mode": "dot_product"}
    if pool_size is not None:
        axes = spatial_axes(state, out)
        if not isinstance(pool_size, Sequence) or len(pool_size) != axes:
            raise ValueError(f"pool_size={pool_size!r}: expected None, or a size for each of the {axes} axes")
        options |= {"sub_sample": "before", "pool_size": tuple(pool_size)}
    return _non_local(state, layers, options)


def efficient_attention(state: State, out: str, *, head_count: int) -> Plan:
    """EfficientAttention of cmsflash/efficient-attention."""
    layers = {"keys": "keys", "queries": "queries", "values": "values", "out": out}
    options: Options = {"heads": head_count, "bias": _has_bias(state, layers)}
    for name, layer in (("key_channels", "keys"), ("value_channels", "values")):
        options[name] = state[f"{layer}.weight"].shape[0]
        divides("head_count", head_count, name, options[name])
    return Plan(EfficientNL, options, layers)


def latentgnn(state: State, out: str, *, mode: str | None = None) -> Plan:
    """LatentGNNV1 of latentgnn/LatentGNN-V1-PyTorch."""
    visible = "symmetric" if _has(state, "down_channel") else "asymmetric"
    v2l = "_v2l" if _read("mode", mode, LatentMode, (visible,)) == "asymmetric" else ""
    count = len({key.split(".")[0] for key in state if key.startswith("LatentGNN_Kernel_")})
    kernels = {f"kernels.{i}": f"LatentGNN_Kernel_{i}" for i in range(max(1, count))}
    sequences = {"to_latent": f"down_channel{v2l}", "from_latent": "down_channel_l2v", "out": "up_channel"}
    for ours, theirs in kernels.items():
        parts = {"to_latent": f"psi{v2l}", "from_latent": "psi_l2v", "graph": "GraphConvWeight"}
        sequences |= {f"{ours}.{part}": f"{theirs}.{name}" for part, name in parts.items()}
    layers = {"gamma": "gamma"}
    for ours, theirs in sequences.items():
        layers |= {ours: f"{theirs}.0", f"{ours}.norm": f"{theirs}.1"}
    options = {
        "mode": visible,
        "inner_channels": state[f"down_channel{v2l}.0.weight"].shape[0],
        "latent_dims": [state[f"{kernel}.psi{v2l}.0.weight"].shape[0] for kernel in kernels.values()],
        "graph_conv": any(_has(state, f"{kernel}.GraphConvWeight") for kernel in kernels.values()),
    }
    return Plan(LatentGNN, options, layers)


def timm_se(state: State, out: str, *, act_layer: str = "relu", gate_layer: str = "sigmoid") -> Plan:
    """SEModule of timm and SqueezeExcitation of torchvision; SqueezeExcite of timm's EfficientNets."""
    gate = choice("gate_layer", gate_layer, ("sigmoid", "hard_sigmoid"))
    options = {"activation": choice("act_layer", act_layer, Activation), "gate": gate}
    squeeze = {"fc2": "fc1", "conv_expand": "conv_reduce"}[out]
    return Plan(SqueezeExcite, options | _inner(state, squeeze), {"squeeze": squeeze, "out": out})


def timm_global_context(state: State, out: str, *, gate_layer: str = "sigmoid") -> Plan:
    """GlobalContext of timm."""
    adds, scales = _has(state, "mlp_add"), _has(state, "mlp_scale")
    layers = {"scores": "conv_attn"}
    for ours in ("add", "scale"):
        parts = {"squeeze": "fc1", "norm": "norm", "out": "fc2"}
        layers |= {f"{ours}.{part}": f"mlp_{ours}.{name}" for part, name in parts.items()}
    options: Options = {
        "fusion": "both" if adds and scales else "add" if adds else "scale",
        "pooling": "softmax" if _has(state, "conv_attn") else "mean",
        "gate": choice("gate_layer", gate_layer, ("sigmoid", "hard_sigmoid")),
    }
    return Plan(GlobalContext, options | _inner(state, out.replace("fc2", "fc1")), layers)


def timm_grn(state: State, out: str) -> Plan:
    """GlobalResponseNorm of timm."""
    return Plan(GlobalResponseNorm, {}, {"weight": "weight", "bias": "bias"})


def timm_xca(state: State, out: str) -> Plan:
    """XCA of timm's xcit."""
    layers = {"q": "qkv", "k": "qkv", "v": "qkv", "temperature": "temperature", "out": out}
    options = {"heads": len(state["temperature"]), "bias": "qkv.bias" in state, "residual": False}
    return Plan(XCA, options, layers, _thirds(state, "qkv", "qkv"))


def timm_lite_mla(state: State, out: str, *, dim: int = 8) -> Plan:
    """LiteMLA of timm's efficientvit_mit, without convolutions at several scales."""
    rows = len(state["qkv.conv.weight"])
    divides("dim", dim, "a third of the channels of qkv", rows // 3)
    layers = {"q": "qkv.conv", "k": "qkv.conv", "v": "qkv.conv", "out": out, "out.norm": "proj.norm"}
    options = {
        "heads": rows // (3 * dim),
        "inner_channels": rows // 3,
        "norm": "batch" if _has(state, "proj.norm") else "none",
        "bias": _has_bias(state, layers),
        "residual": False,
    }
    # Head by head: its queries, its keys, its values.
    parts = torch.arange(rows).reshape(-1, 3, dim).unbind(1)
    by_name = {name: part.flatten() for name, part in zip("qkv", parts, strict=True)}
    return Plan(ReLULinearAttention, options, layers, by_name)


def timm_linear_self_attention(state: State, out: str) -> Plan:
    """LinearSelfAttention of timm's mobilevit, for patches of one pixel."""
    layers = dict.fromkeys(("scores", "keys", "values"), "qkv_proj") | {"out": out}
    rows = len(state["qkv_proj.weight"])
    parts = torch.arange(rows).tensor_split([1, 1 + rows // 2])
    options = {"inner_channels": rows // 2, "bias": _has_bias(state, layers), "residual": False}
    return Plan(SeparableAttention, options, layers, dict(zip(layers, parts, strict=False)))


def hydra(state: State, out: str) -> Plan:
    """HydraAttention of robflynnyh/hydra-linear-attention."""
    names = ("query", "key", "value")
    layers = dict.fromkeys(names, "qkv") | {"out": out}
    rows = _thirds(state, "qkv", names)
    options = {"inner_channels": len(rows["value"]), "bias": _has_bias(state, layers), "residual": False}
    return Plan(HydraAttention, options, layers, rows)


def _pooled_after(
    state: State, out: str, conv: str, mode: str | None, sub_sample: bool | None
) -> tuple[dict[str, str], Options]:
    """Layers and options of the two peers that pool after φ and g, which nests their keys in a Sequential."""
    possible: tuple[str, ...] = ("embedded_gaussian", "dot_product")
    if _has(state, "concat_project"):
        possible = ("concatenation",)
    elif not _has(state, "theta"):
        possible = ("gaussian",)
    options: Options = {"mode": _read("mode", mode, Mode, possible)}
    pooled = _read("sub_sample", sub_sample, (True, False), (_has(state, "g.0"),))
    if pooled:
        axes = spatial_axes(state, out)
        options |= {"sub_sample": "after", "pool_size": (1, 2, 2) if axes == 3 else (2,) * axes}
    inside = f".0{conv}" if pooled else conv
    return {"theta": f"theta{conv}", "phi": f"phi{inside}", "g": f"g{inside}", "out": out}, options


def _non_local(state: State, layers: dict[str, str], options: Options, *, out_bias: bool = True) -> Plan:
    inner, bias = state[f"{layers['out']}.weight"].shape[1], _has_bias(state, layers)
    return Plan(
        NonLocal, options | {"inner_channels": inner, "bias": bias, "out_bias": bias and out_bias}, layers
    )


def _has(state: State, layer: str) -> bool:
    return any(key.startswith(f"{layer}.") for key in state)


def _has_bias(state: State, layers: dict[str, str]) -> bool:
    """Whether any convolution has a bias. All or none do; if only some do, the rest is reported missing."""
    return any(f"{theirs}.bias" in state for ours, theirs in layers.items() if ours != "out.norm")


def spatial_axes(state: State, out: str) -> int:
    """How many the convolution has."""
    shape = tuple(state[f"{out}.weight"].shape)
    if not 3 <= len(shape) <= 5:
        raise ValueError(
            f"{out}.weight has shape {shape}; expected the weight of a 1-d, 2-d or 3-d convolution"
        )
    return len(shape) - 2


def _read(name: str, given: T | None, choices: Any, possible: tuple[T, ...]) -> T:
    """An option that the keys determine or restrict: `given` if allowed (default: the first allowed)."""
    if given is None:
        return possible[0]
    if choice(name, given, choices) not in possible:
        raise ValueError(f"{name}={given!r}: the keys belong to {name}={' or '.join(map(repr, possible))}")
    return given


def _inner(state: State, layer: str) -> Options:
    return {"inner_channels": len(state[f"{layer}.weight"])}


def _thirds(state: State, layer: str, names: Sequence[str]) -> dict[str, Tensor]:
    """The rows of a layer that three of the block's share equally; a remainder makes the first too long."""
    return dict(zip(names, torch.arange(len(state[f"{layer}.weight"])).tensor_split(3), strict=True))
