"""Features kept on disk between passes, so that no pass computes again what an earlier one has.

A pass runs the network's own code from its start. Up to where the last pass stopped, its operations are made
on meta tensors, which have shapes but no data; from there on, the features that the last pass has saved take
their place. Which ones are needed is found beforehand by a run on fake tensors.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from polynl.beyond.tiles.calls import Call
from polynl.beyond.tiles.sites import NotTiledError, tensors_in

Key = tuple[int, int]


class Steps(TorchDispatchMode):
    """Numbers what a network does, operations and answered calls; knows the step of every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._paused = False
        self._keys: dict[int, Key] = {}
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        kwargs = kwargs or {}
        if (
            self._paused or func.namespace == "prim"
        ):  # fake tensors are asked for their device, others are not
            return func(*args, **kwargs)
        return self._step(str(func), lambda: self.operation(func, args, kwargs), (args, kwargs))

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make an operation."""
        return func(*args, **kwargs)

    def answered(self, call: Call, answer: Callable[[Call], Tensor]) -> Tensor:
        """A call that is answered from outside, as one step."""
        return self._step(type(call).__name__, lambda: self._pausing(call, answer), call.x)

    def _pausing(self, call: Call, answer: Callable[[Call], Tensor]) -> Tensor:
        self._paused = True
        try:
            return self.call(call, answer)
        finally:
            self._paused = False

    def call(self, call: Call, answer: Callable[[Call], Tensor]) -> Tensor:
        """Answer a call."""
        return answer(call)

    def _step(self, name: str, make: Callable[[], Any], inputs: Any) -> Any:
        self.used(tensors_in(inputs))
        self.begin(name)
        result = make()
        self.names.append(name)
        for number, tensor in enumerate(tensors_in(result)):
            # What an operation changes in place stays the tensor of the step that made it.
            if id(tensor) not in self._keys and self.keeps((len(self.names) - 1, number), tensor):
                self._keys[id(tensor)] = (len(self.names) - 1, number)
                self._alive.append(tensor)  # so that no other gets its id
        return result

    def begin(self, name: str) -> None:
        """Called before every step."""

    def used(self, tensors: list[Tensor]) -> None:
        """Called with what a step uses."""

    def keeps(self, key: Key, tensor: Tensor) -> bool:
        """Whether a tensor has to be known later."""
        return True

    def key(self, tensor: Tensor) -> Key | None:
        """By which step a tensor was made; None for parameters and the image."""
        return self._keys.get(id(tensor))


class Uses(Steps):
    """Finds the last step in which every tensor is used."""

    def __init__(self) -> None:
        super().__init__()
        self.last_use: dict[Key, int] = {}
        self.stops: list[int] = []

    def used(self, tensors: list[Tensor]) -> None:
        """See the class."""
        for tensor in tensors:
            if (key := self.key(tensor)) is not None:
                self.last_use[key] = len(self.names)

    def live_at(self, stop: int) -> set[Key]:
        """What was made before a step and is used in it or later."""
        return {key for key, use in self.last_use.items() if key[0] < stop <= use}


class Replay(Steps):
    """Runs a network from `start` on, with the features live there, and keeps those live at its end."""

    def __init__(self, expected: list[str], start: int, features: dict[Key, Tensor], live: set[Key]) -> None:
        super().__init__()
        self._expected, self._start = expected, start
        self._features, self._live = features, live

    def begin(self, name: str) -> None:
        """Refuse a network that does not do the same each time."""
        step = len(self.names)
        if step >= len(self._expected) or self._expected[step] != name:
            raise NotTiledError(
                f"the features of this network cannot be kept: its step {step} is {name}; "
                "run it without keep="
            )

    def keeps(self, key: Key, tensor: Tensor) -> bool:
        """Features for the next pass, and meta tensors, which stand for features."""
        return key in self._live or tensor.is_meta

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On meta tensors before the start; then on the features themselves."""
        early = len(self.names) < self._start
        if early and func._schema.is_mutable and not all(tensor.is_meta for tensor in tensors_in(args[:1])):
            raise NotTiledError("the features of this network cannot be kept: it changes its input in place")
        place = self._without_data if early else self._with_data
        return func(*pytree.tree_map_only(Tensor, place, args), **pytree.tree_map_only(Tensor, place, kwargs))

    def call(self, call: Call, answer: Callable[[Call], Tensor]) -> Tensor:
        """As an operation."""
        if len(self.names) < self._start:
            return dataclasses.replace(call, x=self._without_data(call.x)).neutral()
        return answer(dataclasses.replace(call, x=self._with_data(call.x)))

    def _without_data(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _with_data(self, tensor: Tensor) -> Tensor:
        key = self.key(tensor)
        return self._features[key] if tensor.is_meta and key is not None else tensor

    def output(self, output: Any) -> Any:
        """The network's result, with data."""
        return pytree.tree_map_only(Tensor, self._with_data, output)

    def live(self) -> dict[Key, Tensor]:
        """The features for the next pass."""
        found = {key: tensor for tensor in self._alive if (key := self.key(tensor)) in self._live}
        return {key: self._with_data(tensor) for key, tensor in found.items()}


class Kept:
    """The features of every tile in a folder, from where the last pass stopped."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device

    def load(self, tile: int) -> dict[Key, Tensor]:
        """Mapped to memory: they are read when they are used."""
        path = self._path(tile)
        if not path.exists():
            return {}
        features = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {key: tensor.to(self._device) for key, tensor in features.items()}

    def save(self, tile: int, features: dict[Key, Tensor]) -> None:
        """In place of those of the pass before."""
        temporary = self._path(tile).with_suffix(".tmp")
        torch.save({key: tensor.clone() for key, tensor in features.items()}, temporary)
        os.replace(temporary, self._path(tile))

    def _path(self, tile: int) -> Path:
        return self._folder / f"{tile}.pt"


def fake_uses(run: Callable[[Tensor, Steps], Any], shape: tuple[int, ...], like: Tensor) -> Uses:
    """What a run on a fake image does and uses; `run` gets the image and the steps that count."""
    uses = Uses()
    with FakeTensorMode(allow_non_fake_inputs=True):
        image = torch.empty(shape, dtype=like.dtype, device=like.device)
        with uses:
            output = run(image, uses)
    uses.used(tensors_in(output))
    return uses
