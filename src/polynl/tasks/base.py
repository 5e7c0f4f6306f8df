"""What the one training loop needs to know of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Part(BaseModel):
    """A part of a recipe: an unknown key is an error, and the docstring below a key is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Batch:
    """Images and what is to be found in them; `bad` names the files that could not be read."""

    images: Any
    targets: Any
    bad: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, *, channels_last: bool) -> Batch:
        """The batch with its tensors on the device, and a map of images laid out as wished."""
        images = _moved(self.images, device)
        if channels_last and isinstance(images, Tensor):
            images = images.contiguous(memory_format=torch.channels_last)
        return replace(self, images=images, targets=_moved(self.targets, device))


class Scorer(Protocol):
    """Collects what a model says of one batch after the other; every process has its share of them."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Take in a batch."""

    def compute(self) -> dict[str, float]:
        """The scores over the batches of all processes, the same in each of them."""


class Images(Protocol):
    """A data set of known length."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Task(ABC):
    """Data, model, loss and scores of a task, from its part of a recipe."""

    best_by: str
    """The score, of those the scorer computes, that the best checkpoint has the highest of."""

    @abstractmethod
    def check(self) -> None:
        """Raise a SettingsError where files are missing: called before anything is built."""

    @abstractmethod
    def train_set(self) -> Images:
        """What is trained on; augmentation draws from torch's global generator."""

    @abstractmethod
    def val_set(self) -> Images:
        """What is scored on."""

    @abstractmethod
    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """A batch of samples; in training as many as there are samples, or the processes would differ."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; random values come from torch's global generator."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss, means over the batch; what is minimised is their sum."""

    @abstractmethod
    def scorer(self, device: torch.device) -> Scorer:
        """A new scorer."""


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _moved(entry, device) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(entry, device) for entry in value]
    return value
