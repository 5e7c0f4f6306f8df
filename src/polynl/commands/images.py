"""Commands that show what networks see in images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.markup import escape
from tyro.conf import UseAppendAction, arg

from polynl.commands.options import DIR, FILE, Images, Keys, OptionalModule, OptionalRecipe, option_names
from polynl.errors import SettingsError, near_matches


@dataclass(frozen=True)
class Predict:
    """Classify images or detect objects in them: print, draw and save what is seen.

    Keys of the recipe can be overridden, as for polynl train:
      polynl predict photos/ --checkpoint runs/finetune/poly_nl-res4
      polynl predict cat.jpg --checkpoint FILE --recipe imagenet --model.block none
    """

    images: Images
    """Image files, or folders of them; must come first."""
    checkpoint: Annotated[Path, arg(metavar="RUN|FILE")]
    """Folder of a run, a checkpoint or weights in it, or weights of a torchvision ResNet or Mask R-CNN."""
    recipe: OptionalRecipe = None
    """Recipe it was trained with (default: recipe.yaml next to it)."""
    out: Annotated[Path, DIR] = Path("predictions")
    """Folder for a contact sheet, CSV and JSON; for detectors one PNG per image and JSON in COCO format."""
    top: Annotated[int | None, arg(metavar="COUNT")] = None
    """For classifiers: number of classes per image (default: 5)."""
    threshold: Annotated[float | None, arg(metavar="SCORE")] = None
    """For detectors: hide detections scoring below this (default: 0.5)."""
    labels: Annotated[Path | None, FILE] = None
    """Names of the classes: a text file with a line for each, or JSON by number (default: the run's)."""
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.predict.run.run_predict`."""
        from polynl.predict.run import run_predict

        run_predict(
            self.images,
            self.checkpoint,
            self.out,
            console,
            recipe=self.recipe,
            keys=self.keys,
            threshold=self.threshold,
            top=self.top,
            labels=self.labels,
        )


@dataclass(frozen=True)
class Apply:
    """Run a network on images larger than memory, in tiles, as on the whole image.

    Images keep their size; .npy, zarr and TIFF files are read tile by tile.
      polynl apply slide.tif --checkpoint runs/slides/poly_nl-res4 --tile 1024
      polynl apply slide.npy --checkpoint FILE --features layer3
      polynl apply slide.npy --checkpoint FILE --influence 8000 6000
    """

    images: Images
    """Image files, zarr arrays, or folders of them; must come first."""
    checkpoint: Annotated[Path, arg(metavar="RUN|FILE")]
    """Folder of a run, a checkpoint or weights in it, or weights of a torchvision ResNet; of a classifier."""
    recipe: OptionalRecipe = None
    """Recipe it was trained with (default: recipe.yaml next to it)."""
    tile: Annotated[int, arg(metavar="PIXELS")] = 1024
    """Side of a tile; larger tiles need more memory and less time."""
    keep: bool = False
    """Keep features between passes on disk, in --out while it runs, instead of computing them again."""
    top: Annotated[int, arg(metavar="COUNT")] = 5
    """Number of classes per image."""
    features: OptionalModule = None
    """Write the output of this module as a .npy file, instead of classes."""
    influence: Annotated[tuple[float, float] | None, arg(metavar="X Y")] = None
    """Write the influence map of this pixel as .npy and .png files, instead of classes."""
    block: OptionalModule = None
    """Block for --influence, by the module it is inserted at (default: the first)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    out: Annotated[Path, DIR] = Path("applied")
    """Folder for predictions.csv, predictions.json and maps."""
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.apply.run.run_apply`."""
        from polynl.apply.run import Request, run_apply
        from polynl.explain.networks import networks_from_checkpoints
        from polynl.explain.run import move_networks

        if not self.images:
            raise SettingsError("specify images: polynl apply IMAGE …, with files or folders of them.")
        networks = networks_from_checkpoints([self.checkpoint], self.recipe, self.keys, option_names(self))
        move_networks(networks, self.device)
        request = Request(self.tile, self.keep, self.top, self.features, self.influence, self.block)
        run_apply(self.images, networks[0], request, self.out, console)


@dataclass(frozen=True)
class Explain:
    """Draw what networks look at: Grad-CAM, feature norms and influence maps.

    Keys of the checkpoints' recipes can be overridden, as for polynl train:
      polynl explain photo.jpg --checkpoint FILE --checkpoint ANOTHER
      polynl explain photo.jpg --model torchvision/resnet50 --weights FILE
      polynl explain photo.jpg --model torchvision/resnet50 --model timm/resnest50d
    """

    images: Images
    """Image files, or folders of them; must come first."""
    checkpoint: Annotated[UseAppendAction[tuple[Path, ...]], arg(metavar="RUN|FILE")] = ()
    """Folder of a run, or a checkpoint or weights in it; repeat it to compare several."""
    recipe: OptionalRecipe = None
    """Recipe the checkpoints were trained with (default: recipe.yaml next to each)."""
    model: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="LIBRARY/NAME")] = ()
    """Network of torchvision or timm to explain; repeat it to compare several."""
    weights: Annotated[UseAppendAction[tuple[Path, ...]], FILE] = ()
    """Weights for each --model, in the same order, as safetensors or a state dict; none: random weights
    (default: random weights)."""
    insert: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="BLOCK@MODULE")] = ()
    """Insert a block before a module of every --model that has it; repeat it for more blocks."""
    stride_in_1x1: bool = False
    """Downsample in the 1×1 convolution of --model's bottlenecks, as some ResNet weights require."""
    target: Annotated[str | None, arg(metavar="CLASS")] = None
    """For classifiers: class to explain, by name or number (default: the predicted class)."""
    position: Annotated[tuple[float, float] | None, arg(metavar="X Y")] = None
    """Pixel whose influence map to draw (default: where Grad-CAM is highest)."""
    detection: Annotated[int | None, arg(metavar="NUMBER")] = None
    """For detectors: the detection to explain, counted from 0 (default: the highest-scoring)."""
    block: OptionalModule = None
    """Block for feature norms and influence, by the module it is inserted at (default: the first)."""
    layer: OptionalModule = None
    """Module whose output Grad-CAM uses (default: the last one with more than one position)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    out: Annotated[Path, DIR] = Path("explanations")
    """Folder for the pictures."""
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.explain.run.run_explain`."""
        from polynl.explain.explanation import Query
        from polynl.explain.networks import NO_WEIGHTS, networks_by_name, networks_from_checkpoints
        from polynl.explain.run import move_networks, run_explain

        self._check()
        networks = networks_from_checkpoints(self.checkpoint, self.recipe, self.keys, option_names(self))
        named = networks_by_name(self.model, self.weights, self.insert, stride_in_1x1=self.stride_in_1x1)
        for network, file in zip(named, self.weights or [NO_WEIGHTS] * len(named), strict=True):
            if file == NO_WEIGHTS:
                console.print(escape(f"{network.name}: load others with --weights FILE."))
        networks += named
        move_networks(networks, self.device)
        query = Query(self.target, self.position, self.detection, self.block, self.layer)
        run_explain(self.images, networks, query, self.out, console)

    def _check(self) -> None:
        if not self.images:
            raise SettingsError("specify images: polynl explain IMAGE …, with files or folders of them.")
        # Without a checkpoint there is no recipe whose keys these could be.
        if self.keys and not self.checkpoint:
            options = [f"--{name}" for name in option_names(self)]
            raise SettingsError(f"there is no option {self.keys[0]}.{near_matches(self.keys[0], options)}")
        if not self.checkpoint and not self.model:
            raise SettingsError("specify a network: --checkpoint FILE or --model LIBRARY/NAME.")
        if not self.model and (self.weights or self.insert or self.stride_in_1x1):
            raise SettingsError("--weights, --insert and --stride-in-1x1 need --model.")
