"""Networks to explain: from checkpoints of runs, or by name with weights from a file."""

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
from polynl.explain.capture import Images, block_of, is_detector
from polynl.insertion import insert, inserted
from polynl.models.resnet import move_strides
from polynl.models.weights import load_weights
from polynl.tasks.base import Task
from polynl.train.run_folder import find_trained


@dataclass(frozen=True)
class ExplainedNetwork:
    """A network in eval mode, and how to prepare images for it."""

    name: str
    model: nn.Module
    labels: Mapping[int, str]
    """Class names by their numbers in the model's output."""
    view: Transform
    """From a uint8 image (3, h, w) to the uint8 image that the network sees; also transforms boxes."""
    inputs: Callable[[Tensor], Images]
    """From that image to the model's input."""
    task: Task | None = None
    """The task of a run's network."""

    @property
    def detects(self) -> bool:
        """Whether it is a detector."""
        return is_detector(self.model)

    @property
    def block(self) -> str | None:
        """The name of its first block."""
        return block_of(self.model) if inserted(self.model) else None


def networks_from_checkpoints(
    checkpoints: Sequence[Path], recipe: str | None, keys: Sequence[str], options: Sequence[str]
) -> list[ExplainedNetwork]:
    """See `network_from_checkpoint`; networks of the same name get the names of their folders as well."""
    networks = [network_from_checkpoint(path, recipe, keys, options) for path in checkpoints]
    names = [network.name for network in networks]
    return [
        network if names.count(network.name) == 1 else replace(network, name=_longer_name(path))
        for path, network in zip(checkpoints, networks, strict=True)
    ]


def _longer_name(checkpoint: Path) -> str:
    folder = checkpoint.resolve().parent
    return f"{folder.parent.name}/{folder.name}/{checkpoint.name}"


def network_from_checkpoint(
    checkpoint: Path, recipe: str | None = None, keys: Sequence[str] = (), options: Sequence[str] = ()
) -> ExplainedNetwork:
    """The network in a checkpoint.

    `recipe`: what it was trained with (default: recipe.yaml next to it). `keys` override it, as for
    `polynl train`.
    """
    trained = find_trained(checkpoint, recipe, keys, options)
    task, model = trained.task, trained.load(torch.device("cpu"))
    name = checkpoint.resolve().parent.name
    return ExplainedNetwork(name, model, task.output_labels(), task.view(), task.inputs, task)


def network_by_name(
    name: str, weights: Path | None, blocks: Sequence[str] = (), *, stride_in_1x1: bool = False
) -> ExplainedNetwork:
    """A network of torchvision or timm, such as "torchvision/resnet50".

    `weights`: a file (default: random weights); blocks that it does not contain stay new.
    `blocks`: blocks to insert, each as BLOCK@MODULE.
    """
    library, _, arch = name.partition("/")
    if library not in LIBRARIES or not arch:
        choices = " or ".join(f"{known}/NAME" for known in LIBRARIES)
        raise SettingsError(f"--model {name}: expected {choices}, such as torchvision/resnet50.")
    network = LIBRARIES[library](arch)
    if stride_in_1x1:
        try:
            move_strides(network.model, arch)
        except ValueError as error:
            raise SettingsError(f"--stride-in-1x1: {error}.") from None
    for block in blocks:
        _insert(network.model, block)
    if weights is not None:
        try:
            load_weights(network.model, weights)
        except OSError as error:
            raise SettingsError(f"--weights: {weights} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise SettingsError(f"--weights: {error}.") from None
    return replace(network, name=" + ".join([arch, *blocks]))


def _from_torchvision(arch: str) -> ExplainedNetwork:
    known = torchvision.models.list_models()
    if arch not in known:
        raise SettingsError(f"--model: torchvision has no network {arch!r}.{near_matches(arch, known)}")
    published = next(iter(torchvision.models.get_model_weights(arch)))
    builder = torchvision.models.get_model_builder(arch)
    # Detectors would download weights for their ResNets.
    without = {"weights_backbone": None} if "weights_backbone" in signature(builder).parameters else {}
    model = builder(weights=None, **without).eval()
    labels = dict(enumerate(published.meta.get("categories", ())))
    preset = published.transforms()
    if is_detector(model):
        return ExplainedNetwork(arch, model, labels, Identity(), _detector_inputs)
    if not isinstance(preset, ImageClassification):
        raise SettingsError(f"--model: torchvision's {arch} is neither a classifier nor a detector.")
    view = val_transform(preset.crop_size[0], preset.resize_size[0], preset.interpolation)
    return ExplainedNetwork(arch, model, labels, view, partial(_normalized, mean=preset.mean, std=preset.std))


def _from_timm(arch: str) -> ExplainedNetwork:
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
    normalize = partial(_normalized, mean=published["mean"], std=published["std"])
    return ExplainedNetwork(arch, model, dict(enumerate(names)), view, normalize)


LIBRARIES: dict[str, Callable[[str], ExplainedNetwork]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
}


def _insert(model: nn.Module, block: str) -> None:
    name, _, module = block.partition("@")
    if not (name and module):
        raise SettingsError(f"--insert {block}: expected BLOCK@MODULE, such as poly_nl@layer3.5.")
    try:
        # Detectors take a list of images.
        example = ([torch.zeros(3, 64, 64)],) if is_detector(model) else None
        insert(model, name, before=module, example=example)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"--insert {block}: {error}") from None


def _detector_inputs(image: Tensor) -> list[Tensor]:
    return [image.float() / 255]


def _normalized(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    middle, spread = (torch.tensor(values).mul(255)[:, None, None] for values in (mean, std))
    return ((image.float() - middle) / spread).unsqueeze(0)
