"""The commands: dataclasses of options, whose docstrings are the help texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.markup import escape
from tyro.conf import OmitArgPrefixes, Positional, Suppress, UseAppendAction, arg

from polynl.bench.settings import LayerSettings, NetSettings
from polynl.data.config import SceneFiles
from polynl.errors import SettingsError, check_resume_or_overwrite, near_matches
from polynl.reproduce.settings import ReproduceSettings

# Imports that only `run` needs are made there: `polynl --help` need not load torch or matplotlib.

FILE, DIR = arg(metavar="FILE"), arg(metavar="DIR")
RecipeName = Annotated[Positional[str], arg(metavar="RECIPE")]
OptionalRecipe = Annotated[str | None, arg(metavar="RECIPE")]
OptionalModule = Annotated[str | None, arg(metavar="MODULE")]
Images = Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE …")]
# Options of the recipe, which `polynl.cli` collects.
Keys = Suppress[tuple[str, ...]]


class BenchLayers(LayerSettings):  # noqa: D101
    __doc__ = LayerSettings.__doc__

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.layers.run_layers`."""
        from polynl.bench.layers import run_layers

        run_layers(self, console)


class BenchNets(NetSettings):  # noqa: D101
    __doc__ = NetSettings.__doc__

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.networks.run_networks`."""
        from polynl.bench.networks import run_networks

        run_networks(self, console)


@dataclass(frozen=True)
class BenchCompare:
    """Compare two runs of `polynl bench layers` or of `polynl bench nets`.

    A change is marked if the interquartile ranges of the two runs do not overlap.
    """

    first: Annotated[Positional[Path], arg(metavar="OLD")]
    """JSON file of the earlier run."""
    second: Annotated[Positional[Path], arg(metavar="NEW")]
    """JSON file of the later run."""
    all: bool = False
    """Show every measurement, not only those that changed."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.compare.run_compare`."""
        from polynl.bench.compare import run_compare

        run_compare(self.first, self.second, console, everything=self.all)


@dataclass(frozen=True)
class Train:
    """Train from a recipe, in one process or under torchrun.

    Recipes that come with polynl are found by name. Every key can be overridden:
      polynl train scenes --model.block none --optimizer.lr 0.004
      polynl train my.yaml --data.root DIR --out runs/mine
    """

    recipe: RecipeName
    """Recipe file or name; must come first."""
    out: Annotated[Path | None, DIR] = None
    """Folder of the run (default: runs/<recipe>/<block>-<placement>)."""
    resume: bool = False
    """Resume from the last checkpoint in --out, if there is one."""
    overwrite: bool = False
    """Replace the run in --out."""
    list_keys: bool = False
    """List the keys of the recipe with their values and meanings, and exit."""
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.train.loop.train`."""
        from polynl.train.loop import train
        from polynl.train.recipe_file import find_recipe, keys_table, load_recipe
        from polynl.train.run_folder import default_folder

        check_resume_or_overwrite(resume=self.resume, overwrite=self.overwrite)
        recipe = load_recipe(self.recipe, self.keys, _options(self))
        if self.list_keys:
            console.print(keys_table(recipe))
            return
        out = default_folder(find_recipe(self.recipe), recipe) if self.out is None else self.out
        train(recipe, out, console, resume=self.resume, overwrite=self.overwrite)


@dataclass(frozen=True)
class Evaluate:
    """Score a checkpoint on the validation images of a recipe.

    It can run under torchrun. Keys of the recipe can be overridden:
      polynl evaluate scenes --checkpoint FILE --data.val-images 5000
    """

    recipe: RecipeName
    """Recipe file or name, such as the recipe.yaml in the folder of a run; must come first."""
    checkpoint: Annotated[Path | None, FILE] = None
    """Checkpoint of polynl train to score, or weights as safetensors or a state dict."""
    out: Annotated[Path | None, FILE] = None
    """Write the scores to this JSON file."""
    save_detections: Path | None = None
    """Save all detections: to a JSON file of COCO results, for faces to a folder of text files."""
    detections: Path | None = None
    """Score detections saved like this, by any program, instead of a checkpoint."""
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.train.evaluation.evaluate_checkpoint` and `evaluate_detections`."""
        from polynl.train.evaluation import evaluate_checkpoint, evaluate_detections
        from polynl.train.recipe_file import load_recipe

        if (self.checkpoint is None) == (self.detections is None):
            raise SettingsError("specify what to score: --checkpoint FILE or --detections PATH.")
        recipe = load_recipe(self.recipe, self.keys, _options(self))
        if self.checkpoint is not None:
            evaluate_checkpoint(
                recipe, self.checkpoint, self.out, console, save_detections=self.save_detections
            )
        elif self.detections is not None:
            if self.save_detections is not None:
                raise SettingsError(
                    "--save-detections cannot be combined with --detections, which are saved already."
                )
            evaluate_detections(recipe, self.detections, self.out, console)


@dataclass(frozen=True)
class EvaluateFaces:
    """Score face detections as WIDER FACE does: AP of Easy, Medium and Hard faces."""

    predictions: Annotated[Positional[Path], DIR]
    """Folder with a file EVENT/IMAGE.txt per image: its name, a count, and lines of x y w h score."""
    ground_truth: Annotated[Path, DIR]
    """Folder with the official wider_face_val.mat and wider_{easy,medium,hard}_val.mat."""
    curves: Annotated[Path, FILE] = Path("wider_face.png")
    """PNG file for the three precision–recall curves."""
    partial: bool = False
    """Score only images that have predictions, instead of requiring all of them."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.tasks.face_detection.metric.wider_face_evaluation`."""
        from polynl.files import check_destination
        from polynl.tasks.face_detection.curves import draw_curves
        from polynl.tasks.face_detection.files import read_ground_truth, read_predictions
        from polynl.tasks.face_detection.metric import wider_face_evaluation

        check_destination(self.curves, "file", "--curves")
        if self.curves.suffix.lower() != ".png":
            raise SettingsError(f"--curves: {self.curves} must end in .png.")
        truth = read_ground_truth(self.ground_truth)
        found = read_predictions(self.predictions, truth, partial=self.partial)
        evaluation = wider_face_evaluation(truth.only(found), found)
        for subset, ap in evaluation.ap.items():
            console.print(f"{subset.capitalize():>8} {ap:.5f}", highlight=False)
        draw_curves(evaluation, self.curves)
        images = f"{len(found):,} of {len(truth):,} images" if len(found) < len(truth) else "all images"
        console.print(escape(f"Scored on {images}. Curves: {self.curves}"), highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Predict:
    """Detect objects in images: draw boxes, masks and labels, and write JSON.

    Keys of the recipe can be overridden, as for polynl train:
      polynl predict photos/ --checkpoint runs/coco/poly_nl-res4/best.pt
    """

    images: Images
    """Image files, or folders of them; must come first."""
    checkpoint: Annotated[Path, FILE]
    """Checkpoint or weights in the folder of a run, or weights of torchvision's Mask R-CNN."""
    recipe: OptionalRecipe = None
    """Recipe it was trained with (default: recipe.yaml next to it)."""
    out: Annotated[Path, DIR] = Path("predictions")
    """Folder for one PNG per image and detections.json, in COCO format."""
    threshold: Annotated[float, arg(metavar="SCORE")] = 0.5
    """Hide detections scoring below this."""
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
        )


@dataclass(frozen=True)
class Explain:
    """Draw what networks look at: Grad-CAM, feature norms and influence maps.

    Keys of the checkpoints' recipes can be overridden, as for polynl train:
      polynl explain photo.jpg --checkpoint FILE --checkpoint ANOTHER
      polynl explain photo.jpg --model torchvision/resnet50 --weights FILE
    """

    images: Images
    """Image files, or folders of them; must come first."""
    checkpoint: Annotated[UseAppendAction[tuple[Path, ...]], FILE] = ()
    """Checkpoint or weights in the folder of a run; repeat it to compare several."""
    recipe: OptionalRecipe = None
    """Recipe the checkpoints were trained with (default: recipe.yaml next to each)."""
    model: Annotated[str | None, arg(metavar="LIBRARY/NAME")] = None
    """Network of torchvision or timm to explain."""
    weights: Annotated[Path | None, FILE] = None
    """Weights for --model, as safetensors or a state dict (default: random weights)."""
    insert: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="BLOCK@MODULE")] = ()
    """Insert a block before a module of --model; repeat it for more blocks."""
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
        from polynl.explain.networks import network_by_name, networks_from_checkpoints
        from polynl.explain.run import move_networks, run_explain

        self._check()
        networks = networks_from_checkpoints(self.checkpoint, self.recipe, self.keys, _options(self))
        if self.model is not None:
            named = network_by_name(self.model, self.weights, self.insert, stride_in_1x1=self.stride_in_1x1)
            networks.append(named)
            if self.weights is None:
                console.print(escape(f"{named.name} has random weights; load others with --weights FILE."))
        move_networks(networks, self.device)
        query = Query(self.target, self.position, self.detection, self.block, self.layer)
        run_explain(self.images, networks, query, self.out, console)

    def _check(self) -> None:
        if not self.images:
            raise SettingsError("specify images: polynl explain IMAGE …, with files or folders of them.")
        # Without a checkpoint there is no recipe whose keys these could be.
        if self.keys and not self.checkpoint:
            options = [f"--{name}" for name in _options(self)]
            raise SettingsError(f"there is no option {self.keys[0]}.{near_matches(self.keys[0], options)}")
        if not self.checkpoint and self.model is None:
            raise SettingsError("specify a network: --checkpoint FILE or --model LIBRARY/NAME.")
        if self.model is None and (self.weights is not None or self.insert or self.stride_in_1x1):
            raise SettingsError("--weights, --insert and --stride-in-1x1 need --model.")


@dataclass(frozen=True)
class Compare:
    """Compare two trained networks: is one better than the other, beyond chance?

    Takes folders of polynl train, scored on the same images, or checkpoints, which are scored now on the
    validation images of the recipe next to them.
    """

    first: Annotated[Positional[Path], arg(metavar="RUN_A")]
    """Folder of a run, or a checkpoint."""
    second: Annotated[Positional[Path], arg(metavar="RUN_B")]
    """What to compare it with."""
    out: Annotated[Path | None, FILE] = None
    """Write the scores, their difference and the intervals to this JSON file."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.compare.run.run_compare`."""
        from polynl.compare.run import run_compare

        run_compare(self.first, self.second, self.out, console)


@dataclass(frozen=True)
class Report:
    """Write a report of runs: one HTML page, which works offline.

    Takes folders of polynl reproduce, polynl train and polynl bench, in any mix.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR …")]
    """Folders of the runs."""
    out: Annotated[Path, FILE] = Path("report.html")
    """File to write."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.report.run.run_report`."""
        from polynl.report.run import run_report

        run_report(self.runs, self.out, console)


@dataclass(frozen=True, kw_only=True)
class Reproduce(ReproduceSettings):  # noqa: D101
    __doc__ = ReproduceSettings.__doc__
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.reproduce.run.run_reproduce`."""
        from polynl.reproduce.run import run_reproduce

        run_reproduce(self, console, self.keys)


@dataclass(frozen=True)
class DataScenes:
    """Write drawn scenes to files: an ImageFolder that is a COCO data set as well.

    The scenes are those that `data.source: scenes` draws with the same options.
    """

    out: Annotated[Path, DIR]
    """Folder for train/, val/ and annotations/; file names in annotations are relative to train/ and val/."""
    scenes: OmitArgPrefixes[SceneFiles] = dataclasses.field(default_factory=SceneFiles)
    overwrite: bool = False
    """Replace the scenes in --out."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.data.scenes_export.export_scenes`."""
        from polynl.data.scenes_export import export_scenes

        export_scenes(self.scenes, self.out, console, overwrite=self.overwrite)


def _options(command: Train | Evaluate | Explain) -> list[str]:
    """The names of a command's options, suggested for mistyped keys."""
    names = (field.name.replace("_", "-") for field in dataclasses.fields(command))
    return [name for name in names if name not in ("recipe", "keys")]
