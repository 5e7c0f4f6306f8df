"""Weights trained with other implementations: a peer's state dict becomes a block with the peer's output.

Each source is one function from a state dict, and the options that it does not show, to a :class:`Plan`.
Turning a plan into a block is the same for all of them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from polynl.blocks.base import Block
from polynl.blocks.efficient import EfficientNL
from polynl.blocks.latent_gnn import LatentGNN
from polynl.blocks.latent_gnn import Mode as LatentMode
from polynl.blocks.non_local import Mode, NonLocal
from polynl.blocks.options import choice, divides, flag
from polynl.blocks.registry import check_known
from polynl.errors import shortened

T = TypeVar("T")
State = dict[str, Tensor]
Options = dict[str, Any]


class Plan(NamedTuple):
    """The block that computes what a peer does, and where the peer keeps the block's parameters.

    `layers` maps the names of the block's layers, and of the parameters it holds itself, to the peer's. It
    may list more than the block has.
    """

    block: type[Block]
    options: Options
    layers: dict[str, str]


class Source(NamedTuple):
    """A peer: how to read its state dict, and its names for the output convolution, which identify it."""

    plan: Callable[..., Plan]
    """From the state dict, which of `outputs` is in it, and the peer's options as keywords."""
    outputs: tuple[str, ...]


def load_peer(state_dict: Mapping[str, Tensor], source: str, *, prefix: str = "", **options: Any) -> Block:
    """The block with the same output as the peer that the weights come from, in training and evaluation.

    `options` are what a state dict does not show, with the names and defaults of the peer's own constructor.
    Where the default is None, the keys show the value, and a value given must agree with them:

    * ``mmcv`` (NonLocal1d, 2d, 3d): `mode`, `sub_sample`, `use_scale=True`
    * ``timm`` (NonLocalAttn): `use_scale=True`
    * ``non_local_pytorch`` (NONLocalBlock1D, 2D, 3D): `mode`, `sub_sample`
    * ``slowfast`` (Nonlocal): `instantiation="softmax"`, `pool_size=None`, `norm_type`
    * ``efficient_attention`` (EfficientAttention): `head_count` (required)
    * ``latentgnn`` (LatentGNNV1): `mode`

    Keys do not distinguish embedded Gaussian from dot product (default: "embedded_gaussian"), nor SlowFast's
    parameterless layer norm from no norm (default: "none"): pass the option if the other was used.

    `prefix` selects the peer in a whole network's state dict. Every key under it must be used, and every key
    that is needed must be there, except `num_batches_tracked`, which old state dicts lack.

    The block is in training mode, like any new module. It holds copies of the tensors, with their dtypes and
    devices.

    >>> peer = {f"{name}.{kind}": torch.ones(4, 4, 1, 1) if kind == "weight" else torch.ones(4)
    ...         for name in ("keys", "queries", "values", "reprojection") for kind in ("weight", "bias")}
    >>> load_peer(peer, "efficient_attention", head_count=2).heads
    2
    """
    peer = SOURCES[choice("source", source, SOURCES)]
    _check_options(source, options)
    prefix = f"{prefix.removesuffix('.')}." if prefix else ""
    state = _below(state_dict, prefix)
    out = next((name for name in peer.outputs if f"{name}.weight" in state), None)
    if out is None:
        raise _misfit(state, source, prefix, missing=[f"{peer.outputs[0]}.weight"])
    axes = _spatial_axes(state, out)
    try:
        plan = peer.plan(state, out, **options)
    except KeyError as error:
        raise _misfit(state, source, prefix, missing=error.args) from None
    # On the meta device the block draws no random numbers for values that are about to be replaced.
    with torch.device("meta"):
        block = plan.block(state[f"{out}.weight"].shape[0], init="random", **plan.options)
    ours = block.state_dict()
    keys = {name: _peer_key(name, plan.layers) for name in ours}
    missing = [key for key in keys.values() if key not in state and not key.endswith(".num_batches_tracked")]
    unexpected = state.keys() - set(keys.values())
    if missing or unexpected:
        raise _misfit(state, source, prefix, missing, sorted(unexpected))
    tensors = {name: _converted(name, like, keys[name], state, axes) for name, like in ours.items()}
    block.load_state_dict(tensors, assign=True)
    return block


def _mmcv(
    state: State, out: str, *, mode: str | None = None, sub_sample: bool | None = None, use_scale: bool = True
) -> Plan:
    layers, options = _pooled_after(state, out, ".conv", mode, sub_sample)
    layers |= {"out.norm": "conv_out.bn", "pair": "concat_project.conv.weight"}
    normed = _has(state, "conv_out.bn")
    scaled = flag("use_scale", use_scale) and options["mode"] == "embedded_gaussian"
    options |= {"norm": "batch" if normed else "none", "scale": "inner" if scaled else "none"}
    return _non_local(state, layers, options, out_bias=not normed)


def _non_local_pytorch(
    state: State, out: str, *, mode: str | None = None, sub_sample: bool | None = None
) -> Plan:
    layers, options = _pooled_after(state, out, "", mode, sub_sample)
    layers |= {"out.norm": "W.1", "pair": "concat_project.0.weight"}
    return _non_local(state, layers, options | {"norm": "batch" if out == "W.0" else "none"})


def _timm(state: State, out: str, *, use_scale: bool = True) -> Plan:
    layers = {"theta": "t", "phi": "p", "g": "g", "out": out, "out.norm": "norm"}
    scale = "channels" if flag("use_scale", use_scale) else "none"
    return _non_local(state, layers, {"mode": "embedded_gaussian", "norm": "batch", "scale": scale})


def _slowfast(
    state: State,
    out: str,
    *,
    instantiation: str = "softmax",
    pool_size: Sequence[int] | None = None,
    norm_type: str | None = None,
) -> Plan:
    norm = "bn" if _has(state, "bn") else "norm"
    layers = {"theta": "conv_theta", "phi": "conv_phi", "g": "conv_g", "out": out, "out.norm": norm}
    norms = {"batchnorm": "batch", "layernorm": "layer", "none": "none"}
    possible = ("batchnorm",) if _has(state, norm) else ("none", "layernorm")
    options: Options = {"norm": norms[_read("norm_type", norm_type, norms, possible)]}
    softmax = choice("instantiation", instantiation, ("softmax", "dot_product")) == "softmax"
    options |= {"mode": "embedded_gaussian", "scale": "inner"} if softmax else {"mode": "dot_product"}
    if pool_size is not None:
        axes = _spatial_axes(state, out)
        if not isinstance(pool_size, Sequence) or len(pool_size) != axes:
            raise ValueError(f"pool_size={pool_size!r}: expected None, or a size for each of the {axes} axes")
        options |= {"sub_sample": "before", "pool_size": tuple(pool_size)}
    return _non_local(state, layers, options)


def _efficient_attention(state: State, out: str, *, head_count: int) -> Plan:
    layers = {"keys": "keys", "queries": "queries", "values": "values", "out": out}
    options: Options = {"heads": head_count, "bias": _has_bias(state, layers)}
    for name, layer in (("key_channels", "keys"), ("value_channels", "values")):
        options[name] = state[f"{layer}.weight"].shape[0]
        divides("head_count", head_count, name, options[name])
    return Plan(EfficientNL, options, layers)


def _latentgnn(state: State, out: str, *, mode: str | None = None) -> Plan:
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


SOURCES = {
    "mmcv": Source(_mmcv, ("conv_out.conv",)),
    "timm": Source(_timm, ("z",)),
    "non_local_pytorch": Source(_non_local_pytorch, ("W.0", "W")),
    "slowfast": Source(_slowfast, ("conv_out",)),
    "efficient_attention": Source(_efficient_attention, ("reprojection",)),
    "latentgnn": Source(_latentgnn, ("up_channel.0",)),
}


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
        axes = _spatial_axes(state, out)
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


def _spatial_axes(state: State, out: str) -> int:
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


def _check_options(source: str, options: Options) -> None:
    known = dict(list(inspect.signature(SOURCES[source].plan).parameters.items())[2:])
    check_known(f"source={source!r}", options, known)
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise TypeError(
                f"source={source!r} needs the option {name!r}, which its state dict does not show"
            )


def _below(state_dict: Mapping[str, Tensor], prefix: str) -> State:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is a {type(state_dict).__name__}; expected a dict of tensors")
    state = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    if not state:
        keys = shortened(list(state_dict), 5) or "none"
        raise ValueError(f"prefix={prefix!r}: no key starts with it; the keys are {keys}")
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"state_dict[{prefix + key!r}] is a {type(value).__name__}; expected a tensor")
    return state


def _peer_key(name: str, layers: dict[str, str]) -> str:
    layer, _, leaf = name.rpartition(".")
    return layers[name] if name in layers else f"{layers[layer]}.{leaf}"


def _converted(name: str, like: Tensor, key: str, state: State, axes: int) -> Tensor:
    """A copy of the peer's tensor in the block's shape: a 1×1 convolution's weight becomes a matrix."""
    tensor = state.get(key)
    if tensor is None:
        return torch.zeros((), dtype=like.dtype, device=next(iter(state.values())).device)
    expected = (*like.shape, *(1,) * axes) if like.dim() == 2 else tuple(like.shape)
    expected = {"pair": (1, *like.shape, 1, 1)}.get(name, expected)
    if tensor.shape != expected:
        raise ValueError(f"{key} has shape {tuple(tensor.shape)}; expected {expected}")
    if like.is_floating_point() and not tensor.is_floating_point():
        raise TypeError(f"{key} has dtype {tensor.dtype}; expected a floating-point dtype")
    dtype = tensor.dtype if like.is_floating_point() else like.dtype
    return tensor.detach().to(dtype).reshape(like.shape).clone(memory_format=torch.contiguous_format)


def _misfit(
    state: State, source: str, prefix: str, missing: Sequence[str], unexpected: Sequence[str] = ()
) -> ValueError:
    """The error for keys that are not the source's, with a source or prefix that would match."""
    rest = ("unexpected", unexpected) if unexpected else ("given", [*state])
    found = "; ".join(f"{kind} {shortened(keys, 5)}" for kind, keys in [("missing", missing), rest] if keys)
    others = [
        f"source={name!r}"
        for name, peer in SOURCES.items()
        if name != source and any(f"{out}.weight" in state for out in peer.outputs)
    ]
    prefixes = [
        f"prefix={prefix + key.removesuffix(f'{out}.weight')!r}"
        for out in SOURCES[source].outputs
        for key in state
        if key.endswith(f".{out}.weight")
    ]
    hint = f". Did you mean {shortened(others + prefixes, 5)}?" if others or prefixes else ""
    return ValueError(f"source={source!r}: the keys do not match: {found}{hint}")
