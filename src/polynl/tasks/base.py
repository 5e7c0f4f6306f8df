"""What the rest of polynl needs to know about a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchvision.transforms.v2 import Identity, Transform

from polynl.data.config import Split
from polynl.data.images import Unreadable, UnreadableImageError
from polynl.tasks.config import SourceConfig, TaskConfig
from polynl.tasks.detections import Detections
from polynl.tasks.outcomes import Array, Outcomes


@dataclass(frozen=True)
class Batch:
    """Images and targets; `bad` names the files that could not be read."""

    images: Any
    targets: Any
    bad: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    """The places of the images in the data set; only in evaluation."""

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, *, channels_last: bool) -> Batch:
        """The batch on a device, a tensor of images in channels-last format if asked for."""
        images, targets = tree_map_only(
            Tensor, lambda part: part.to(device, non_blocking=True), (self.images, self.targets)
        )
        if channels_last and isinstance(images, Tensor):
            images = images.contiguous(memory_format=torch.channels_last)
        return replace(self, images=images, targets=targets)


class Scorer(Protocol):
    """Collects a model's outputs batch by batch; every process has a share of the batches."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add a batch."""

    def share(self) -> Any:
        """What this process has collected; it is pickled."""

    def compute(self, shares: Sequence[Any]) -> dict[str, float]:
        """The scores over the shares of all processes; only the first process calls it."""

    def outcomes(self) -> Outcomes:
        """What the scores were computed from; after `compute`, in the first process."""


class Images(Protocol):
    """A data set of known length."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class PaperTable:
    """The paper's results for a task."""

    setting: str
    """Network and data set, such as "ResNet-50 on ImageNet"."""
    scores: tuple[str, ...]
    """The scores of a row, in its order, by their names in polynl."""
    rows: Mapping[str, tuple[float, ...]]
    """By block, or by block@placement if the placement is not res4."""
    source: str
    """The data source of its recipe."""
    images: int
    """The number of images that it is scored on."""
    arch: str = "resnet50"
    digits: int = 2
    """Decimals in the paper."""

    def covers(self, recipe: Mapping[str, Any], images: int | None) -> bool:
        """Whether a training with this recipe, scored on so many images, can be compared with it."""
        trained = recipe["model"]["arch"], recipe["data"]["source"], images
        return trained == (self.arch, self.source, self.images)

    def figures(self, row: str) -> dict[str, float]:
        """A row's figures by score; empty if the paper has no such row."""
        return dict(zip(self.scores, self.rows[row], strict=True)) if row in self.rows else {}


class Task(ABC):
    """Data, model, loss and scores of a task, from its keys in a recipe.

    `polynl.tasks.registry` lists the tasks; training, reports and explanations find everything else here.
    """

    name: ClassVar[str]
    """The task's name in recipes."""
    config: ClassVar[type[TaskConfig]]
    """The keys that the task adds to a recipe."""
    scores: ClassVar[Mapping[str, str]]
    """The scores that tables show, in their order, with column headings."""
    best_by: ClassVar[str]
    """The score that chooses the best checkpoint; higher is better."""
    headline: ClassVar[tuple[str, ...]]
    """The scores shown after every epoch and drawn as curves."""
    network: ClassVar[str] = "{arch}"
    """The model's name in titles; `{arch}` stands for the network that blocks go into."""
    paper: ClassVar[PaperTable | None] = None
    """The paper's table, if it has one for this task."""
    hub_task: ClassVar[str] = "image-classification"
    """What the Hugging Face Hub calls it."""
    extra: ClassVar[str] = "train"
    """The extra of polynl that installs what the task imports."""

    def __init__(self, config: Any, labels: Mapping[int, str] | None = None) -> None:
        """`config` is an instance of the class's `config`; `labels` are those of a trained model."""
        self._model, self._data = config.model, config.data
        self._labels = None if labels is None else dict(labels)
        self._loaded: dict[Split, Any] = {}

    def _load(self, split: Split) -> Any:
        if split not in self._loaded:
            self._loaded[split] = self._data.load(split)
        return self._loaded[split]

    @classmethod
    def about_images(cls, source: str) -> str:
        """What the images of a data source show, and what a network is to say of them."""
        data = cls.config.model_fields["data"].annotation
        kinds = [k for k in get_args(data) or (data,) if isinstance(k, type) and issubclass(k, SourceConfig)]
        return next(
            (kind.about for kind in kinds if get_args(kind.model_fields["source"].annotation) == (source,)),
            "",
        )

    @classmethod
    def counted(cls, outcomes: Outcomes) -> str:
        """How many images were scored, in words."""
        return "1 image" if len(outcomes) == 1 else f"{len(outcomes):,} images"

    @classmethod
    def pretrained_labels(cls) -> dict[int, str] | None:
        """The names of classes in published weights, for checkpoints without a file of labels."""
        return None

    @abstractmethod
    def labels(self) -> dict[int, str]:
        """The names of the classes or categories, by number."""

    @abstractmethod
    def view(self) -> Transform:
        """Transforms a uint8 image (3, h, w) to the uint8 image that the network sees, and boxes with it."""

    @abstractmethod
    def inputs(self, image: Tensor) -> Any:
        """The model's input in eval mode, from one image that `view` returned."""

    def output_labels(self) -> dict[int, str]:
        """The names of classes by their numbers in the model's output."""
        return self.labels()

    @abstractmethod
    def check(self, *, training: bool = True) -> None:
        """Raise a SettingsError if files are missing or the model cannot be built; called first of all.

        Without `training`, check only the data that scoring needs.
        """

    def notes(self) -> list[str]:
        """What a new run says at its start: choices that were made for the user."""
        return []

    def train_set(self) -> Images:
        """The training images; augmentation draws from torch's global generator."""
        return self._load("train")

    def val_set(self) -> Images:
        """The images to score on."""
        return self._load("val")

    def groups(self) -> Sequence[int] | None:
        """For every training image, the group whose images may share a batch; None: any may."""
        return None

    @abstractmethod
    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """A batch; in training always of as many samples as given, so that all processes agree."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, initialised from torch's global generator."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss, each a mean over the batch; training minimises their sum."""

    @abstractmethod
    def scorer(self) -> Scorer:
        """A new scorer."""

    @classmethod
    @abstractmethod
    def score_outcomes(cls, outcomes: Outcomes, weights: Array) -> dict[str, Array]:
        """The scores that tables show, for every row of weights (r, images): how often an image counts."""


class DetectionTask(Task):
    """A task whose models detect objects; detections can be saved, and read from other programs.

    "By image" means a mapping from an image's key (its id or name in the data set) to its detections, in the
    form of the task's metric.
    """

    hub_task = "object-detection"
    detections_are: Literal["file", "folder"] = "file"
    """What `write_detections` writes and `read_detections` reads."""

    def check(self, *, training: bool = True) -> None:
        """Raise a SettingsError if files of data or weights are missing."""
        self._data.check(training=training)
        if training:
            self._model.check_files()

    def view(self) -> Transform:
        """Detectors resize images themselves."""
        return Identity()

    def inputs(self, image: Tensor) -> list[Tensor]:
        """A list of one image, from 0 to 1."""
        return [image.float() / 255]

    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """Images of any sizes, side by side."""
        good, bad = readable(samples, training=training)
        return Batch([image for image, _ in good], [target for _, target in good], bad)

    def scorer(self) -> DetectionScorer:
        """Scores detections by image."""
        return DetectionScorer(self)

    @abstractmethod
    def detect(self, model: nn.Module, images: Sequence[Tensor]) -> list[Detections]:
        """The detections of a model in eval mode, for each uint8 image (3, h, w)."""

    @abstractmethod
    def by_image(self, targets: Sequence[Any], found: Sequence[Detections]) -> dict[Any, Any]:
        """Detections by image, for images to score on with these targets."""

    @abstractmethod
    def read_detections(self, path: Path) -> dict[Any, Any]:
        """Detections by image from a file or folder; a SettingsError says what is wrong with it."""

    @abstractmethod
    def write_detections(self, path: Path, detections: Mapping[Any, Any]) -> None:
        """Write detections by image so that `read_detections` reads them."""

    @abstractmethod
    def score_detections(self, detections: Mapping[Any, Any]) -> dict[str, float]:
        """The scores on the images that the detections are given for."""

    @abstractmethod
    def outcomes(self, detections: Mapping[Any, Any]) -> Outcomes:
        """What was found in every image that the detections are given for."""


class DetectionScorer:
    """Collects detections by image; the first process merges and scores them."""

    def __init__(self, task: DetectionTask) -> None:
        self._task = task
        self._found: dict[Any, Any] = {}

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add a batch."""
        self._found |= self._task.by_image(batch.targets, self._task.detect(model, batch.images))

    def share(self) -> dict[Any, Any]:
        """The detections of this process."""
        return self._found

    def compute(self, shares: Sequence[dict[Any, Any]]) -> dict[str, float]:
        """The scores on the images of all processes."""
        self._found = {image: found for share in shares for image, found in share.items()}
        return self._task.score_detections(self._found)

    def outcomes(self) -> Outcomes:
        """What was found in every image."""
        return self._task.outcomes(self._found)

    def save(self, path: Path) -> None:
        """Write the detections; after `compute`, in the first process, these are all."""
        self._task.write_detections(path, self._found)


def readable(samples: Sequence[Any], *, training: bool) -> tuple[list[Any], tuple[str, ...]]:
    """The samples that could be read, and what is wrong with the others.

    In training, readable samples replace the others, so that all processes have as many.
    """
    good = [sample for sample in samples if not isinstance(sample, Unreadable)]
    bad = tuple(sample.reason for sample in samples if isinstance(sample, Unreadable))
    if training:
        if not good:
            raise UnreadableImageError(f"no image of a batch of {len(samples)} can be read; {bad[0]}")
        good = [good[number % len(good)] for number in range(len(samples))]
    return good, bad
