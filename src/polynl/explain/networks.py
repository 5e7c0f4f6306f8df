"""Networks to explain: from checkpoints of runs, or by name with weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    longer = ["/".join((*path.resolve().parts[-3:-1], path.name)) for path in checkpoints]
    return [
        network if names.count(network.name) == 1 else replace(network, name=name)
        for network, name in zip(networks, longer, strict=True)
    ]


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
        with _option("--stride-in-1x1"):
            move_strides(network.model, arch)
    # Detectors take a list of images.
    example = ([torch.zeros(3, 64, 64)],) if network.detects else None
    for block in blocks:
        kind, _, module = block.partition("@")
        if not (kind and module):
            raise SettingsError(f"--insert {block}: expected BLOCK@MODULE, such as poly_nl@layer3.5.")
        with _option(f"--insert {block}"):
            insert(network.model, kind, before=module, example=example)
    if weights is not None:
        with _option("--weights"):
            load_weights(network.model, weights)
    return replace(network, name=" + ".join([arch, *blocks]))


@contextmanager
def _option(option: str) -> Iterator[None]:
    """Errors become a SettingsError that names the option."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{option}: {error.filename} cannot be read: {error.strerror}.") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{option}: {str(error).removesuffix('.')}.") from None


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
        return ExplainedNetwork(arch, model, labels, Identity(), lambda image: [image.float() / 255])
    if not isinstance(preset, ImageClassification):
        raise SettingsError(f"--model: torchvision's {arch} is neither a classifier nor a detector.")
    view = val_transform(preset.crop_size[0], preset.resize_size[0], preset.interpolation)
    return ExplainedNetwork(arch, model, labels, view, partial(_normalized, mean=preset.mean, std=preset.std))


def _from_timm(arch: str) -> ExplainedNetwork:
    import timm
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    if arch.partition(".")[0] not in (known := timm.list_models()):
        raise SettingsError(f"--model: timm has no network {arch!r}.{near_matches(arch, known)}")
    model: Any = timm.create_model(arch, pretrained=False).eval()
    published = model.pretrained_cfg
    size, interpolation = published["input_size"][-1], InterpolationMode(published["interpolation"])
    view = val_transform(size, int(size / published["crop_pct"]), interpolation)
    subset = infer_imagenet_subset(model)
    names = ImageNetInfo(subset).label_descriptions() if subset else ()
    normalize = partial(_normalized, mean=published["mean"], std=published["std"])
    return ExplainedNetwork(arch, model, dict(enumerate(names)), view, normalize)


LIBRARIES: dict[str, Callable[[str], ExplainedNetwork]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
}


def _normalized(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    middle, spread = (torch.tensor(values).mul(255)[:, None, None] for values in (mean, std))
    return ((image.float() - middle) / spread).unsqueeze(0)
