"""The networks that are looked into: from checkpoints of runs, or by name with weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.v2 import Identity, InterpolationMode, Transform

from polynl.data.images import val_transform
from polynl.errors import SettingsError, near_matches
from polynl.explain.capture import Images, block_of, finds_boxes
from polynl.insertion import insert, inserted
from polynl.models.resnet import move_strides
from polynl.models.weights import load_weights
from polynl.tasks.base import Task
from polynl.train.run_folder import find_trained


@dataclass(frozen=True)
class Subject:
    """A network in eval mode, and how images get into it."""

    name: str
    model: nn.Module
    labels: Mapping[int, str]
    """The names of classes by their numbers in the model's output."""
    view: Transform
    """From a uint8 image (3, h, w) to the uint8 image that the network sees; boxes move along."""
    inputs: Callable[[Tensor], Images]
    """From that to what the network takes."""
    task: Task | None = None

    @property
    def detects(self) -> bool:
        """Whether it finds boxes."""
        return finds_boxes(self.model)

    @property
    def block(self) -> str | None:
        """The first block in it."""
        return block_of(self.model) if inserted(self.model) else None


def subjects_of(
    checkpoints: Sequence[Path], recipe: str | None, keys: Sequence[str], options: Sequence[str]
) -> list[Subject]:
    """See `subject_of`; those of one name are told apart by the folders that theirs are in."""
    subjects = [subject_of(path, recipe, keys, options) for path in checkpoints]
    names = [subject.name for subject in subjects]
    return [
        subject if names.count(subject.name) == 1 else replace(subject, name=_longer_name(path))
        for path, subject in zip(checkpoints, subjects, strict=True)
    ]


def _longer_name(checkpoint: Path) -> str:
    folder = checkpoint.resolve().parent
    return f"{folder.parent.name}/{folder.name}/{checkpoint.name}"


def subject_of(
    checkpoint: Path, recipe: str | None = None, keys: Sequence[str] = (), options: Sequence[str] = ()
) -> Subject:
    """The network in a checkpoint, by the recipe beside it unless one is named; keys as of `polynl train`."""
    trained = find_trained(checkpoint, recipe, keys, options)
    task, model = trained.task, trained.load(torch.device("cpu"))
    name = checkpoint.resolve().parent.name
    return Subject(name, model, task.output_labels(), task.view(), task.inputs, task)


def subject_named(
    name: str, weights: Path | None, places: Sequence[str] = (), *, stride_in_1x1: bool = False
) -> Subject:
    """A network of torchvision or timm, "torchvision/resnet50", with blocks at "poly_nl@layer3.5" if asked.

    Without `weights` it has random ones. A block that the file does not have stays new.
    """
    library, _, arch = name.partition("/")
    if library not in LIBRARIES or not arch:
        choices = " or ".join(f"{known}/NAME" for known in LIBRARIES)
        raise SettingsError(f"--model {name}: expected {choices}, such as torchvision/resnet50.")
    subject = LIBRARIES[library](arch)
    if stride_in_1x1:
        try:
            move_strides(subject.model, arch)
        except ValueError as error:
            raise SettingsError(f"--stride-in-1x1: {error}.") from None
    for place in places:
        _insert(subject.model, place)
    if weights is not None:
        try:
            load_weights(subject.model, weights)
        except OSError as error:
            raise SettingsError(f"--weights: {weights} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise SettingsError(f"--weights: {error}.") from None
    return replace(subject, name=" + ".join([arch, *places]))


def _from_torchvision(arch: str) -> Subject:
    known = torchvision.models.list_models()
    if arch not in known:
        raise SettingsError(f"--model: torchvision has no network {arch!r}.{near_matches(arch, known)}")
    published = next(iter(torchvision.models.get_model_weights(arch)))
    builder = torchvision.models.get_model_builder(arch)
    # Detectors would download the weights of their ResNets.
    without = {"weights_backbone": None} if "weights_backbone" in signature(builder).parameters else {}
    model = builder(weights=None, **without).eval()
    labels = dict(enumerate(published.meta.get("categories", ())))
    preset = published.transforms()
    if finds_boxes(model):
        return Subject(arch, model, labels, Identity(), _for_detector)
    if not isinstance(preset, ImageClassification):
        raise SettingsError(f"--model: torchvision's {arch} neither classifies images nor finds boxes.")
    view = val_transform(preset.crop_size[0], preset.resize_size[0], preset.interpolation)
    return Subject(arch, model, labels, view, partial(_normalised, mean=preset.mean, std=preset.std))


def _from_timm(arch: str) -> Subject:
    try:
        import timm
        from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
    except ImportError:
        raise SettingsError("--model: timm is not installed: pip install timm.") from None
    if arch.partition(".")[0] not in (known := timm.list_models()):
        raise SettingsError(f"--model: timm has no network {arch!r}.{near_matches(arch, known)}")
    model: Any = timm.create_model(arch, pretrained=False).eval()
    published = model.pretrained_cfg
    size = published["input_size"][-1]
    view = val_transform(
        size, int(size / published["crop_pct"]), InterpolationMode(published["interpolation"])
    )
    subset = infer_imagenet_subset(model)
    names = ImageNetInfo(subset).label_descriptions() if subset else ()
    normalised = partial(_normalised, mean=published["mean"], std=published["std"])
    return Subject(arch, model, dict(enumerate(names)), view, normalised)


LIBRARIES: dict[str, Callable[[str], Subject]] = {"torchvision": _from_torchvision, "timm": _from_timm}


def _insert(model: nn.Module, place: str) -> None:
    block, _, where = place.partition("@")
    if not (block and where):
        raise SettingsError(f"--insert {place}: expected BLOCK@MODULE, such as poly_nl@layer3.5.")
    try:
        # Detectors take a list of images.
        example = ([torch.zeros(3, 64, 64)],) if finds_boxes(model) else None
        insert(model, block, before=where, example=example)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"--insert {place}: {error}") from None


def _for_detector(image: Tensor) -> list[Tensor]:
    return [image.float() / 255]


def _normalised(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    middle, spread = (torch.tensor(values).mul(255)[:, None, None] for values in (mean, std))
    return ((image.float() - middle) / spread).unsqueeze(0)
