"""Networks by name: torchvision's, timm's, and those that a function of the user's own builds."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

import torch
import torchvision
from torch import nn

from polynl.errors import near_matches

Builder = Callable[..., nn.Module]
Result = TypeVar("Result")
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def library_network(name: str) -> nn.Module:
    """An untrained network, such as "torchvision/resnet50"; a ValueError says what is wrong with the name."""
    return _library_builder(name)()


def names_a_network(name: str) -> bool:
    """Whether `network_builder` can look it up: LIBRARY/NAME, or package.module:factory."""
    library, _, arch = name.partition("/")
    return (library in LIBRARIES and arch != "") or FACTORY.fullmatch(name) is not None


def network_builder(name: str) -> Builder:
    """Builds an untrained network of a library, or of a factory such as "package.module:factory"."""
    return _factory(name) if FACTORY.fullmatch(name) else _library_builder(name)


def without_memory(compute: Callable[[], Result]) -> Result:
    """What `compute` returns on the meta device, or on the CPU if it needs values that are not there."""
    try:
        with torch.device("meta"):
            return compute()
    except RuntimeError as error:
        if "meta" not in str(error).lower():
            raise
        return compute()


def _library_builder(name: str) -> Builder:
    library, _, arch = name.partition("/")
    if library not in LIBRARIES or not arch:
        choices = " or ".join(f"{known}/NAME" for known in LIBRARIES)
        raise ValueError(f"{name}: expected {choices}, such as torchvision/resnet50")
    return LIBRARIES[library](arch)


def _from_torchvision(arch: str) -> Builder:
    _check_known("torchvision", arch, torchvision.models.list_models())
    builder = torchvision.models.get_model_builder(arch)
    # Detectors would download weights for their ResNets.
    without = {"weights_backbone": None} if "weights_backbone" in signature(builder).parameters else {}
    return partial(builder, weights=None, **without)


def _from_timm(arch: str) -> Builder:
    import timm

    # The name may end in a tag of weights, such as resnet50.a1_in1k.
    _check_known("timm", arch, [*timm.list_models(), *timm.list_pretrained()])
    return partial(timm.create_model, arch, pretrained=False)


def _check_known(library: str, arch: str, known: list[str]) -> None:
    if arch not in known:
        raise ValueError(f"{library} has no network {arch!r}.{near_matches(arch, known)}")


LIBRARIES: dict[str, Callable[[str], Builder]] = {"torchvision": _from_torchvision, "timm": _from_timm}


def _factory(name: str) -> Builder:
    """The function or class of a module that is installed, or in the current folder."""
    place, _, attribute = name.partition(":")
    factory = getattr(_imported(place), attribute, None)
    if not callable(factory):
        there = [key for key, value in vars(sys.modules[place]).items() if callable(value)]
        raise ValueError(f"{place} has no function or class {attribute!r}.{near_matches(attribute, there)}")
    parameters = signature(factory).parameters
    if not any(key == "num_classes" or p.kind is Parameter.VAR_KEYWORD for key, p in parameters.items()):
        raise ValueError(f"{name} must take num_classes, for which it returns as many logits")
    return factory


def _imported(place: str) -> Any:
    # A console script, unlike python -m, does not search the current folder.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {error.name!r}, neither installed nor in the current folder {folder}"
        ) from None
