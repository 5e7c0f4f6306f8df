"""What the one training loop needs to know of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import Identity, Transform

from polynl.data.images import Unreadable, UnreadableImageError
from polynl.tasks.config import TaskConfig


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
    """Collects what a model says of one batch after the other; every process has a share of them."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add a batch."""

    def share(self) -> Any:
        """What this process has collected, as pickle can send it."""

    def compute(self, shares: Sequence[Any]) -> dict[str, float]:
        """The scores over the shares of all processes; the first process calls it."""


class Images(Protocol):
    """A data set of known length."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class PaperTable:
    """The paper's results for a task, each figure written here and nowhere else."""

    setting: str
    """Network and data set, such as "ResNet-50 on ImageNet"."""
    scores: tuple[str, ...]
    """The scores of a row, in its order, by their names in polynl."""
    rows: Mapping[str, tuple[float, ...]]
    """By block, or by block@placement where it does not stand at res4."""
    digits: int = 2
    """Decimals that the paper prints."""

    def figures(self, row: str) -> dict[str, float]:
        """A row's figures by score; empty if the paper has no such row."""
        return dict(zip(self.scores, self.rows[row], strict=True)) if row in self.rows else {}


class Task(ABC):
    """Data, model, loss and scores of a task, from its keys in a recipe.

    Whatever the rest of polynl needs to know of a task is said here: `polynl.tasks.registry` lists the tasks,
    and training, reports and explanations find everything else through the class.
    """

    name: ClassVar[str]
    """What recipes call the task."""
    config: ClassVar[type[TaskConfig]]
    """The keys that the task adds to a recipe."""
    scores: ClassVar[Mapping[str, str]]
    """Column headings of the scores that tables show, in their order."""
    best_by: ClassVar[str]
    """The score by which the best checkpoint is chosen, higher being better."""
    headline: ClassVar[tuple[str, ...]]
    """The scores shown after every epoch and drawn as curves."""
    network: ClassVar[str] = "{arch}"
    """What titles call the model; `{arch}` stands for the network that blocks go into."""
    paper: ClassVar[PaperTable | None] = None
    """The paper's table, if it has one for this task."""
    extra: ClassVar[str] = "train"
    """The extra of polynl that installs what the task imports."""

    @abstractmethod
    def __init__(self, config: Any, labels: Mapping[int, str] | None = None) -> None:
        """`config` is an instance of the class's `config`; `labels` are those of a trained model."""

    @classmethod
    def pretrained_labels(cls) -> dict[int, str] | None:
        """The names of classes in published weights, for checkpoints without a file of labels."""
        return None

    @abstractmethod
    def labels(self) -> dict[int, str]:
        """The names of what is told apart, by the numbers that the model knows them by."""

    @abstractmethod
    def view(self) -> Transform:
        """From a uint8 image (3, h, w) to the uint8 image that the network sees; boxes move along."""

    @abstractmethod
    def inputs(self, image: Tensor) -> Any:
        """What the model takes of one image of `view`, in eval mode."""

    def output_labels(self) -> dict[int, str]:
        """The names of classes by their numbers in the model's output."""
        return self.labels()

    @abstractmethod
    def check(self, *, training: bool = True) -> None:
        """Raise a SettingsError where files are missing or the model cannot be built: called before all else.

        Without `training` it is about what scoring needs of the data, and about nothing else.
        """

    @abstractmethod
    def train_set(self) -> Images:
        """What is trained on; augmentation draws from torch's global generator."""

    @abstractmethod
    def val_set(self) -> Images:
        """What is scored on."""

    def groups(self) -> Sequence[int] | None:
        """For every image to train on, the number of the group whose images share batches; None: all do."""
        return None

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
    def scorer(self) -> Scorer:
        """A new scorer."""


class DetectionTask(Task):
    """A task whose models find things in images, which files of detections can say as well."""

    detections_are: Literal["file", "folder"] = "file"
    """What `read_detections` reads, and a scorer saves."""

    def view(self) -> Transform:
        """Detectors resize images themselves."""
        return Identity()

    def inputs(self, image: Tensor) -> list[Tensor]:
        """A list of one image, from 0 to 1."""
        return [image.float() / 255]

    @abstractmethod
    def detect(self, model: nn.Module, images: Sequence[Tensor]) -> list[Mapping[str, Tensor]]:
        """Of each uint8 image (3, h, w): boxes (k, 4), labels (k,), scores (k,), maybe masks (k, h, w)."""

    @abstractmethod
    def read_detections(self, path: Path) -> Any:
        """What a file says of the images to score on; a SettingsError says what is wrong with it."""

    @abstractmethod
    def score_detections(self, detections: Any) -> dict[str, float]:
        """The scores of what `read_detections` gave."""


class DetectionScorer(Scorer, Protocol):
    """A scorer that can write down what was found."""

    def save(self, path: Path) -> None:
        """Write what all processes have found, as a file that `read_detections` reads; after `compute`."""


def readable(samples: Sequence[Any], *, training: bool) -> tuple[list[Any], tuple[str, ...]]:
    """The samples that could be read, and what is wrong with the others.

    In training the readable ones fill the places of the others, since all processes take as many.
    """
    good = [sample for sample in samples if not isinstance(sample, Unreadable)]
    bad = tuple(sample.reason for sample in samples if isinstance(sample, Unreadable))
    if training:
        if not good:
            raise UnreadableImageError(f"no image of a batch of {len(samples)} can be read; {bad[0]}")
        good = [good[number % len(good)] for number in range(len(samples))]
    return good, bad


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _moved(entry, device) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(entry, device) for entry in value]
    return value
