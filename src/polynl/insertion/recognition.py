"""Tell which blocks a state dict is of, from its keys and the shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polynl.blocks.registry import build_block
from polynl.errors import shortened
from polynl.insertion.descriptions import Description

Shapes = dict[str, tuple[int, ...]]

# Of a block inside another block, the place is everything before the last `polynl_`.
KEY = re.compile(r"(?:(?P<place>.+)\.)?polynl_(?P<side>before|after)\.(?P<key>.+)")
SPEC = "pass the spec, which polynl.spec(model) makes of the model that was saved"


class Rule(NamedTuple):
    """How to tell channels and options from shapes, and the options that change values and cannot be told."""

    read: Callable[[Shapes], tuple[int, dict[str, Any]]]
    hidden: tuple[str, ...] = ()


def recognised(state: Mapping[str, Any]) -> list[Description]:
    """The blocks with keys in the state dict; a ValueError if the keys and shapes do not tell enough."""
    shapes: dict[tuple[str, str], Shapes] = {}
    for name, tensor in state.items():
        if match := KEY.fullmatch(str(name)):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"the state dict holds a {type(tensor).__name__} as {name!r}, not a tensor")
            own = shapes.setdefault((match["place"] or "", match["side"]), {})
            own[match["key"]] = tuple(tensor.shape)
    # A block inside another comes after it.
    return [
        {"place": place, "side": side, **_recognised(place, side, shapes[place, side])}
        for place, side in sorted(shapes, key=lambda key: len(key[0]))
    ]


def _recognised(place: str, side: str, found: Shapes) -> Description:
    where, shapes = f'the block {side} "{place}"', _comparable(found)
    for name, rule in RULES.items():
        try:
            channels, options = rule.read(shapes)
            with torch.device("meta"):
                block = build_block(name, channels, **options)
        except (LookupError, TypeError, ValueError, ArithmeticError):
            continue
        if _comparable(_shapes_of(block)) != shapes:
            continue
        if not rule.hidden:
            return {"block": name, "channels": channels, "options": options}
        known = "".join(f", {key}={value!r}" for key, value in options.items() if key not in rule.hidden)
        raise ValueError(
            f"{where} is a {name}, and a state dict does not show its {', '.join(rule.hidden)}: {SPEC}; or "
            f'call polynl.insert(model, "{name}", {side}="{place}", channels={channels}{known}) with them'
        )
    raise ValueError(f"{where} cannot be told from its keys {shortened(sorted(found))}: {SPEC}")


def _shapes_of(block: nn.Module) -> Shapes:
    return {key: tuple(tensor.shape) for key, tensor in block.state_dict().items()}


def _comparable(shapes: Shapes) -> Shapes:
    """As all versions of polynl have them: scalars with an axis, linear maps and factors under one key.

    Without the counts of batches, which old files lack.
    """
    factors = [shape for key, shape in shapes.items() if re.fullmatch(r"factors\.\d+", key)]
    alike = {
        key.replace(".linear.", "."): shape or (1,)
        for key, shape in shapes.items()
        if not re.fullmatch(r"factors\.\d+|.*\.num_batches_tracked", key)
    }
    if len(set(factors)) == 1:
        alike["factors"] = (len(factors), *factors[0])
    return alike


def _poly_nl(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    inner, channels = shapes["w1.weight"]
    return channels, {"reduction": channels // inner}


def _non_local(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    inner, channels = shapes["g.weight"]
    embedded = "dot_product" if "theta.weight" in shapes else "gaussian"
    return channels, {
        "mode": "concatenation" if "pair" in shapes else embedded,
        "inner_channels": inner,
        "norm": "batch" if "out.norm.weight" in shapes else "none",
        "bias": "g.bias" in shapes,
        "out_bias": "out.bias" in shapes,
    }


def _efficient_nl(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    keys, channels = shapes["keys.weight"]
    values = shapes["values.weight"][0]
    return channels, {"key_channels": keys, "value_channels": values, "bias": "keys.bias" in shapes}


def _latent_gnn(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    inner, channels = shapes["to_latent.weight"]
    kernels = len({key.split(".")[1] for key in shapes if key.startswith("kernels.")})
    return channels, {
        "latent_dims": [shapes[f"kernels.{i}.to_latent.weight"][0] for i in range(kernels)],
        "inner_channels": inner,
        "mode": "asymmetric" if "from_latent.weight" in shapes else "symmetric",
        "graph_conv": "kernels.0.graph.weight" in shapes,
    }


def _tesa(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    channels, fused = shapes["out.weight"]
    options: dict[str, Any] = {"embedding": "linear" if "a.weight" in shapes else "none"}
    if fused > channels:
        options |= {"fusion": "concat", "spatial_axes": fused // channels - 1}
    return channels, options


# Some options of the following blocks exclude a start as the identity; with a random start all are valid.


def _xca(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    options = {"heads": shapes["temperature"][0], "bias": "q.bias" in shapes, "init": "random"}
    return shapes["q.weight"][1], options


def _relu_linear(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    inner, channels = shapes["q.weight"]
    norm = "batch" if "out.norm.weight" in shapes else "none"
    return channels, {
        "inner_channels": inner,
        "norm": norm,
        "bias": "q.bias" in shapes,
        "init": "random",
    }


def _separable(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    inner, channels = shapes["keys.weight"]
    return channels, {"inner_channels": inner, "bias": "keys.bias" in shapes, "init": "random"}


def _hydra(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    inner, channels = shapes["query.weight"]
    return channels, {"inner_channels": inner, "bias": "query.bias" in shapes, "init": "random"}


def _se(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    inner, channels = shapes["squeeze.weight"]
    return channels, {"inner_channels": inner, "init": "random"}


def _global_context(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    adds, scales = "add.out.weight" in shapes, "scale.out.weight" in shapes
    fusion = "both" if adds and scales else "add" if adds else "scale"
    channels, inner = shapes[f"{'add' if adds else 'scale'}.out.weight"]
    pooling = "softmax" if "scores.weight" in shapes else "mean"
    return channels, {"fusion": fusion, "pooling": pooling, "inner_channels": inner, "init": "random"}


def _grn(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    return shapes["weight"][0], {}


def _polynomial(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    order, rank, channels = shapes["factors"]
    return channels, {
        "order": order,
        "rank": rank,
        "bias": "offset" in shapes,
        "init": "identity" if rank >= channels else "random",
    }


def _conv(shapes: Shapes) -> tuple[int, dict[str, Any]]:
    channels, _, *kernel = shapes["weight"]
    return channels, {"kernel_size": kernel[0], "spatial_axes": len(kernel), "bias": "offset" in shapes}


RULES = {
    "poly_nl": Rule(_poly_nl),
    "non_local": Rule(_non_local, ("mode", "scale", "sub_sample", "pool_size", "norm")),
    "efficient_nl": Rule(_efficient_nl, ("heads", "normalization")),
    "latent_gnn": Rule(_latent_gnn),
    "tesa": Rule(_tesa, ("normalization",)),
    "xca": Rule(_xca, ("residual",)),
    "relu_linear": Rule(_relu_linear, ("heads", "norm", "residual")),
    "separable": Rule(_separable, ("residual",)),
    "hydra": Rule(_hydra, ("normalization", "residual")),
    "se": Rule(_se, ("activation", "gate")),
    "global_context": Rule(_global_context, ("gate",)),
    "grn": Rule(_grn),
    "polynomial": Rule(_polynomial),
    "conv": Rule(_conv, ("residual",)),
}
