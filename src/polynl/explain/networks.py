"""Networks to explain: from checkpoints of runs, or by name with weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.v2 import Identity, InterpolationMode, Transform

from polynl.data.images import val_transform
from polynl.errors import SettingsError, sentence
from polynl.explain.capture import Images, block_of, is_detector
from polynl.insertion import insert, inserted
from polynl.models.libraries import library_network
from polynl.models.resnet import move_strides
from polynl.models.weights import load_weights
from polynl.tasks.base import Task
from polynl.train.run_folder import checkpoint_in, find_trained

# In place of a file: random weights.
NO_WEIGHTS = Path("none")


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
    checkpoints = [checkpoint_in(path) if path.is_dir() else path for path in checkpoints]
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


def networks_by_name(
    names: Sequence[str],
    weights: Sequence[Path] = (),
    blocks: Sequence[str] = (),
    *,
    stride_in_1x1: bool = False,
) -> list[ExplainedNetwork]:
    """See `network_by_name`; networks of the same name get the names of their files as well.

    The names of those with random weights say so, since their pictures mean nothing.

    `weights`: a file for each of them, in their order (default: random weights); "none" is none.
    `blocks` and `stride_in_1x1`: for the networks that have such modules; if none has, the first one says so.
    """
    files = [None if file == NO_WEIGHTS else file for file in weights] or [None] * len(names)
    if len(files) != len(names):
        raise SettingsError(
            f"{len(files)} --weights for {len(names)} networks: specify one for every --model, in the same "
            f"order; --weights {NO_WEIGHTS} stands for random weights."
        )
    found = [_from_library(name) for name in names]
    # torchvision and timm have networks of the same name.
    archs = [arch for arch, _ in {(network.name, name) for network, name in zip(found, names, strict=True)}]
    found = [
        replace(network, name=name) if archs.count(network.name) > 1 else network
        for network, name in zip(found, names, strict=True)
    ]
    inserts = [_having(found, block.partition("@")[2]) for block in blocks]
    strided = _having(found, "layer2.0.conv3") if stride_in_1x1 else []
    networks = []
    for number, (network, file) in enumerate(zip(found, files, strict=True)):
        chosen = [block for block, places in zip(blocks, inserts, strict=True) if number in places]
        networks.append(_prepared(network, file, chosen, stride_in_1x1=number in strided))
    shown = [network.name for network in networks]
    named = []
    for network, file in zip(networks, files, strict=True):
        if file is None:
            network = replace(network, name=f"{network.name} (random weights)")
        elif shown.count(network.name) > 1:
            network = replace(network, name=f"{network.name}, {file.name}")
        named.append(network)
    return named


def _having(networks: Sequence[ExplainedNetwork], module: str) -> list[int]:
    """The numbers of the networks that have a module; the first if none has, for its error."""
    return [number for number, n in enumerate(networks) if module in dict(n.model.named_modules())] or [0]


def network_by_name(
    name: str, weights: Path | None, blocks: Sequence[str] = (), *, stride_in_1x1: bool = False
) -> ExplainedNetwork:
    """A network of torchvision or timm, such as "torchvision/resnet50".

    `weights`: a file (default: random weights); blocks that it does not contain stay new.
    `blocks`: blocks to insert, each as BLOCK@MODULE.
    """
    return _prepared(_from_library(name), weights, blocks, stride_in_1x1=stride_in_1x1)


def _prepared(
    network: ExplainedNetwork, weights: Path | None, blocks: Sequence[str], *, stride_in_1x1: bool
) -> ExplainedNetwork:
    """The network with blocks and weights."""
    if stride_in_1x1:
        with _option("--stride-in-1x1"):
            move_strides(network.model, network.name)
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
    return replace(network, name=" + ".join([network.name, *blocks]))


@contextmanager
def _option(option: str) -> Iterator[None]:
    """Errors become a SettingsError that names the option."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{option}: {error.filename} cannot be read: {error.strerror}.") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{option}: {sentence(error)}") from None


def _from_library(name: str) -> ExplainedNetwork:
    """The network alone, with random weights."""
    with _option("--model"):
        model = library_network(name).eval()
    library, _, arch = name.partition("/")
    return (_of_timm if library == "timm" else _of_torchvision)(arch, model)


def _of_torchvision(arch: str, model: nn.Module) -> ExplainedNetwork:
    published = next(iter(torchvision.models.get_model_weights(arch)))
    labels = dict(enumerate(published.meta.get("categories", ())))
    preset = published.transforms()
    if is_detector(model):
        return ExplainedNetwork(arch, model, labels, Identity(), lambda image: [image.float() / 255])
    if not isinstance(preset, ImageClassification):
        raise SettingsError(f"--model: torchvision's {arch} is neither a classifier nor a detector.")
    view = val_transform(preset.crop_size[0], preset.resize_size[0], preset.interpolation)
    return ExplainedNetwork(arch, model, labels, view, partial(_normalized, mean=preset.mean, std=preset.std))


def _of_timm(arch: str, model: nn.Module) -> ExplainedNetwork:
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    published: Any = model.pretrained_cfg
    size, interpolation = published["input_size"][-1], InterpolationMode(published["interpolation"])
    view = val_transform(size, int(size / published["crop_pct"]), interpolation)
    subset = infer_imagenet_subset(model)
    names = ImageNetInfo(subset).label_descriptions() if subset else ()
    normalize = partial(_normalized, mean=published["mean"], std=published["std"])
    return ExplainedNetwork(arch, model, dict(enumerate(names)), view, normalize)


def _normalized(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    middle, spread = (torch.tensor(values).mul(255)[:, None, None] for values in (mean, std))
    return ((image.float() - middle) / spread).unsqueeze(0)
