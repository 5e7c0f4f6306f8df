"""Weights trained with other implementations: a peer's state dict becomes a block with the peer's output.

How the sources differ is in `peer_plans`; turning a plan into a block is the same for all of them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polynl.blocks import peer_plans as plans
from polynl.blocks.base import Block
from polynl.blocks.options import choice
from polynl.blocks.peer_plans import Options, Plan, State, spatial_axes
from polynl.blocks.registry import check_known
from polynl.errors import shortened


class Source(NamedTuple):
    """A peer: how to read its state dict, and its names for the output layer, which identify it."""

    plan: Callable[..., Plan]
    """From the state dict, which of `outputs` is in it, and the peer's options as keywords."""
    outputs: tuple[str, ...]
    """An empty name is the peer itself."""
    convolves: bool = True
    """Whether its matrices are 1×1 convolutions, and not linear layers."""


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
    * ``timm_se`` (SEModule, SqueezeExcite of EfficientNets, torchvision's SqueezeExcitation):
      `act_layer="relu"`, `gate_layer="sigmoid"`
    * ``timm_global_context`` (GlobalContext): `gate_layer="sigmoid"`
    * ``timm_grn`` (GlobalResponseNorm) and ``timm_xca`` (xcit.XCA)
    * ``timm_lite_mla`` (efficientvit_mit.LiteMLA with `scales=()`): `dim=8`
    * ``timm_linear_self_attention`` (mobilevit.LinearSelfAttention) and ``hydra`` (HydraAttention)

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
    out = next((name for name in peer.outputs if _weight_of(name) in state), None)
    if out is None:
        raise _misfit(state, source, prefix, missing=[_weight_of(peer.outputs[0])])
    axes = spatial_axes(state, out) if peer.convolves else 0
    try:
        plan = peer.plan(state, out, **options)
    except KeyError as error:
        raise _misfit(state, source, prefix, missing=error.args) from None
    # On the meta device the block draws no random numbers for values that are about to be replaced.
    with torch.device("meta"):
        block = plan.block(state[_weight_of(out)].shape[0], init="random", **plan.options)
    ours = block.state_dict()
    keys = {name: _peer_key(name, plan.layers) for name in ours}
    missing = [key for key in keys.values() if key not in state and not key.endswith(".num_batches_tracked")]
    unexpected = state.keys() - set(keys.values())
    if missing or unexpected:
        raise _misfit(state, source, prefix, missing, sorted(unexpected))
    tensors = {
        name: _converted(name, like, keys[name], state, axes, plan.rows) for name, like in ours.items()
    }
    block.load_state_dict(tensors, assign=True)
    return block


SOURCES = {
    "mmcv": Source(plans.mmcv, ("conv_out.conv",)),
    "timm": Source(plans.timm, ("z",)),
    "non_local_pytorch": Source(plans.non_local_pytorch, ("W.0", "W")),
    "slowfast": Source(plans.slowfast, ("conv_out",)),
    "efficient_attention": Source(plans.efficient_attention, ("reprojection",)),
    "latentgnn": Source(plans.latentgnn, ("up_channel.0",)),
    "timm_se": Source(plans.timm_se, ("fc2", "conv_expand")),
    "timm_global_context": Source(plans.timm_global_context, ("mlp_scale.fc2", "mlp_add.fc2")),
    "timm_grn": Source(plans.timm_grn, ("",), convolves=False),
    "timm_xca": Source(plans.timm_xca, ("proj",), convolves=False),
    "timm_lite_mla": Source(plans.timm_lite_mla, ("proj.conv",)),
    "timm_linear_self_attention": Source(plans.timm_linear_self_attention, ("out_proj",)),
    "hydra": Source(plans.hydra, ("out",), convolves=False),
}


def _weight_of(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


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


def _converted(
    name: str, like: Tensor, key: str, state: State, axes: int, rows: dict[str, Tensor] | None
) -> Tensor:
    """A copy of the peer's tensor in the block's shape: a 1×1 convolution's weight becomes a matrix."""
    tensor = state.get(key)
    if tensor is None:
        return torch.zeros((), dtype=like.dtype, device=next(iter(state.values())).device)
    if rows is not None and (own := rows.get(name.rpartition(".")[0])) is not None:
        shared = sum(map(len, rows.values()))
        if tensor.dim() == 0 or len(tensor) != shared:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}; expected {shared} output channels")
        tensor = tensor[own.to(tensor.device)]
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
        if name != source and any(_weight_of(out) in state for out in peer.outputs)
    ]
    prefixes = [
        f"prefix={prefix + key.removesuffix(_weight_of(out))!r}"
        for out in SOURCES[source].outputs
        for key in state
        if missing and key.endswith(f".{_weight_of(out)}")
    ]
    hint = f". Did you mean {shortened(others or prefixes, 5)}?" if others or prefixes else ""
    return ValueError(f"source={source!r}: the keys do not match: {found}{hint}")
