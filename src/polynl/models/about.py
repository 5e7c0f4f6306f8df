"""What a file of weights says about its network, so that it is built right or not loaded at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from polynl.blocks.base import Block
from polynl.insertion.descriptions import description_of

# The entry in the metadata of a safetensors file, and in a training checkpoint.
ENTRY = "polynl"
FORMAT = "polynl weights 1"
# Attributes of modules that change the output and that no shape of a weight tells. Those that are usually
# changed after training, such as dropout or the size that a detector resizes images to, are left out.
ATTRIBUTES = (
    *("stride", "padding", "dilation", "groups", "padding_mode", "output_padding", "ceil_mode"),
    *("eps", "num_heads", "heads", "negative_slope", "approximate"),
    *("sizes", "aspect_ratios", "canonical_scale", "sampling_ratio", "image_mean", "image_std"),
)
# Options of blocks that change how values are computed, or those before training. A polynomial's order does
# more, but there the names of the weights tell it.
NEUTRAL_OPTIONS = ("form", "init", "order")
# What an error says of the network that weights were trained in.
TOLD = ("arch", "arch_options", "block", "options", "placement", "stride_in_1x1")

Structure = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class About:
    """The network that weights are of, and what it was trained for."""

    structure: Structure
    """By the name of a module, what its weights do not tell: see `structure_of`."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The keys that affect what it learned; of paths only the last part."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """The names of the classes or categories, by number."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """On the validation images of its training."""
    epoch: int | None = None
    """After how many epochs the weights were saved."""

    def to_json(self) -> str:
        """The text for `from_json`."""
        content = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return json.dumps({"format": FORMAT, **content}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> About:
        """Read the text of `to_json`; a ValueError says, after the file's name, what is wrong with it."""
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"it has format {content['format']!r}, this version reads {FORMAT!r}")
            labels = {int(number): str(name) for number, name in content["labels"].items()}
            kinds = {"structure": dict, "recipe": dict, "scores": dict, "epoch": int | None}
            for key, kind in kinds.items():
                if not isinstance(content[key], kind):
                    raise ValueError(f"its {key} is {content[key]!r}")
            known = {key: content[key] for key in kinds}
            return cls(labels=labels, **known)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"has an unreadable description of its network: {reason}") from error


def about_file(path: str | os.PathLike[str]) -> About | None:
    """What a safetensors file says about its network; None if it says nothing.

    A ValueError names the file and says what is wrong with it.
    """
    from safetensors import SafetensorError

    try:
        text = described_in(path)
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)!r} is damaged or not a safetensors file: {error}") from error
    return parsed(path, text)


def described_in(path: str | os.PathLike[str]) -> str | None:
    """The text about the network in the metadata of a safetensors file, if there is any."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get(ENTRY)


def parsed(path: str | os.PathLike[str], text: str | None) -> About | None:
    """The text that a file has about its network; a ValueError names the file."""
    try:
        return None if text is None else About.from_json(text)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r} {error}") from error


def structure_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By the name of a module, what the shapes of its weights do not tell: strides, a block's options, ….

    >>> structure_of(nn.Sequential(nn.MaxPool2d(2)))
    {'0': {'stride': 2, 'padding': 0, 'dilation': 1, 'ceil_mode': False}}
    """
    found = ((name, _entry(module)) for name, module in model.named_modules())
    return {name: entry for name, entry in found if entry}


def _entry(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, Block):
        try:
            options = description_of(module)["options"]
        except ValueError:  # a block of the user's own that stores its options under other names
            return {}
        return {name: value for name, value in options.items() if name not in NEUTRAL_OPTIONS}
    values = {name: _plain(getattr(module, name)) for name in ATTRIBUTES if hasattr(module, name)}
    entry = {name: value for name, value in values.items() if value is not None}
    if type(module).__module__ == nn.ReLU.__module__ and not list(module.parameters()):
        entry["activation"] = type(module).__name__
    return entry


def _plain(value: Any) -> Any:
    """The value as JSON gives it back; None if it is not made of numbers and words."""
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    return value if isinstance(value, str | int | float) else None


def differences(about: About, model: nn.Module, left_out: tuple[str, ...] = ()) -> dict[str, str]:
    """Attributes in which the model differs from the network of a file, in words, by name.

    Modules whose names start with one of `left_out` do not count.
    """
    own = structure_of(model)
    return {
        f"{name}.{key}": f"{name}.{key} is {_shown(own[name][key])} (in the file {_shown(value)})"
        for name, entry in about.structure.items()
        if name in own and not f"{name}.".startswith(left_out)
        for key, value in entry.items()
        if key in own[name] and own[name][key] != value
    }


def told(about: About) -> str:
    """The keys of the network that the weights were trained in, in words."""
    keys: Mapping[str, Any] = about.recipe.get("model", {})
    given = [key for key in TOLD if keys.get(key) and (key != "placement" or keys.get("block"))]
    return ", ".join(f"{key} {_shown(keys[key])}" for key in given)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
