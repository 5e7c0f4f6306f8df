"""The commands: dataclasses of options, whose docstrings are the help, and what they run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.markup import escape

from polynl.bench.settings import LayerSettings, NetSettings
from polynl.errors import SettingsError, check_resume_or_overwrite, near_matches
from polynl.reproduce.settings import ReproduceSettings

# What a command needs beyond its options is imported when it runs: `polynl --help` need not load matplotlib.


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
    """What changed between two runs of `polynl bench layers` or of `polynl bench nets`.

    A change is marked where it is outside the spread: the middle halves of the two runs do not touch.
    """

    first: tyro.conf.Positional[Path]
    """JSON of the earlier run."""
    second: tyro.conf.Positional[Path]
    """JSON of the later run."""
    all: bool = False
    """Show every point, not only those outside the spread."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.compare.run_compare`."""
        from polynl.bench.compare import run_compare

        run_compare(self.first, self.second, console, everything=self.all)


@dataclass(frozen=True)
class Train:
    """Train as a recipe says, in one process or in those that torchrun starts.

    polynl train RECIPE.yaml [--key value …]: every key of the recipe can be given anew, as in
    --optimizer.lr 0.2; --list-keys shows them all. The recipes that come with polynl are known by name:
    scenes/poly_nl is one.
    """

    recipe: tyro.conf.Positional[str]
    """The file; it comes before the options."""
    out: Path | None = None
    """Folder of the run; runs/FOLDER/NAME of the recipe's file unless given."""
    resume: bool = False
    """Go on from the last checkpoint in --out, if there is one."""
    overwrite: bool = False
    """Replace the run in --out."""
    list_keys: bool = False
    """Show the recipe's keys, their values and what they mean, and train nothing."""
    keys: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.train.loop.train`."""
        from polynl.train.loop import train
        from polynl.train.recipe_file import find_recipe, keys_table, load_recipe

        check_resume_or_overwrite(resume=self.resume, overwrite=self.overwrite)
        recipe, file = load_recipe(self.recipe, self.keys, _options(self)), find_recipe(self.recipe)
        if self.list_keys:
            console.print(keys_table(recipe))
            return
        out = Path("runs", file.resolve().parent.name, file.stem) if self.out is None else self.out
        train(recipe, out, console, resume=self.resume, overwrite=self.overwrite)


@dataclass(frozen=True)
class Evaluate:
    """Score a checkpoint on the images that a recipe names, in one process or those that torchrun starts."""

    recipe: tyro.conf.Positional[str]
    """The file, as for `polynl train`; a run's folder has one."""
    checkpoint: Path | None = None
    """A checkpoint of `polynl train`, or weights: safetensors, or a state dict."""
    out: Path | None = None
    """A file to write the scores to, as JSON."""
    save_detections: Path | None = None
    """Where to write all that was found: a file in COCO's results format, of faces a folder of text files."""
    detections: Path | None = None
    """Instead of --checkpoint, such a file or folder to score, of any program."""
    keys: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.train.evaluation.evaluate_checkpoint` and `evaluate_detections`."""
        from polynl.train.evaluation import evaluate_checkpoint, evaluate_detections
        from polynl.train.recipe_file import load_recipe

        if (self.checkpoint is None) == (self.detections is None):
            raise SettingsError("give what is to be scored: --checkpoint FILE or --detections PATH.")
        recipe = load_recipe(self.recipe, self.keys, _options(self))
        if self.checkpoint is not None:
            evaluate_checkpoint(
                recipe, self.checkpoint, self.out, console, save_detections=self.save_detections
            )
        elif self.detections is not None:
            if self.save_detections is not None:
                raise SettingsError("--save-detections: --detections names a file that has them already.")
            evaluate_detections(recipe, self.detections, self.out, console)


@dataclass(frozen=True)
class EvaluateFaces:
    """Score the faces that any detector found as WIDER FACE does: AP of its Easy, Medium and Hard ones."""

    predictions: tyro.conf.Positional[Path]
    """Folder with EVENT/IMAGE.txt for every image: its name, a count, and lines of x y w h score."""
    ground_truth: Path
    """Folder of the official wider_face_val.mat and wider_{easy,medium,hard}_val.mat."""
    curves: Path = Path("wider_face.png")
    """File for the three precision–recall curves."""
    partial: bool = False
    """Score those images that there are predictions of, instead of asking for all."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.tasks.face_detection.metric.wider_face_evaluation`."""
        from polynl.files import check_destination
        from polynl.tasks.face_detection.curves import draw_curves
        from polynl.tasks.face_detection.files import read_ground_truth, read_predictions
        from polynl.tasks.face_detection.metric import wider_face_evaluation

        check_destination(self.curves, "file", "--curves")
        if self.curves.suffix.lower() != ".png":
            raise SettingsError(f"--curves: {self.curves} is no name of a PNG, which is what is drawn.")
        truth = read_ground_truth(self.ground_truth)
        found = read_predictions(self.predictions, truth, partial=self.partial)
        evaluation = wider_face_evaluation(truth.only(found), found)
        for subset, ap in evaluation.ap.items():
            console.print(f"{subset.capitalize():>8} {ap:.5f}", highlight=False)
        draw_curves(evaluation, self.curves)
        images = f"{len(found):,} of {len(truth):,} images" if len(found) < len(truth) else "all images"
        console.print(
            escape(f"On {images}; the curves are in {self.curves}."), highlight=False, soft_wrap=True
        )


@dataclass(frozen=True)
class Predict:
    """Draw what a trained detector finds in images: boxes, masks and names; and write it down as JSON.

    Keys of the recipe can be given anew, as for `polynl train`.
    """

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Files, or folders of them."""
    checkpoint: Path
    """A checkpoint or weights in the folder of a run, or torchvision's Mask R-CNN."""
    recipe: str | None = None
    """What it was trained by; the recipe.yaml beside it unless given."""
    out: Path = Path("predictions")
    """Folder for a PNG of each image, and detections.json in COCO's format."""
    threshold: float = 0.5
    """Leave out what the detector is less sure of."""
    keys: tyro.conf.Suppress[tuple[str, ...]] = ()

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
    """Draw what networks look at in images: Grad-CAM, the norms of a block's features, and influence maps.

    polynl explain IMAGE… --checkpoint A --checkpoint B, or --model torchvision/resnet50 --weights FILE
    --insert poly_nl@layer3.5. Keys of the checkpoints' recipes can be given anew, as for `polynl train`.
    """

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Files, or folders of them."""
    checkpoint: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A checkpoint or weights in the folder of a run; give it again for each further one."""
    recipe: str | None = None
    """What the checkpoints were trained by; the recipe.yaml beside each unless given."""
    model: str | None = None
    """A network of torchvision or timm: torchvision/NAME, timm/NAME."""
    weights: Path | None = None
    """Of --model: safetensors, or a state dict; random ones unless given."""
    insert: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Into --model: BLOCK@MODULE puts a block before a module; give it again for each further one."""
    stride_in_1x1: bool = False
    """Let bottlenecks of --model downsample in the 1×1 convolution, as weights of some ResNets need it."""
    target: str | None = None
    """Of a classifier: the class that Grad-CAM is about, by name or number; the predicted unless given."""
    position: tuple[float, float] | None = None
    """X and y in pixels of the image: the influence map is of it. Where Grad-CAM is highest unless given."""
    detection: int | None = None
    """Of a detector: the detection that it is all about, counted from 0; the surest unless given."""
    block: str | None = None
    """The block that features and influence are of, by the module it stands at; the first unless given."""
    layer: str | None = None
    """The module whose maps Grad-CAM takes; the last with several positions unless given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path = Path("explanations")
    """Folder for the pictures."""
    keys: tyro.conf.Suppress[tuple[str, ...]] = ()

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
                console.print(escape(f"{named.name} has random weights: --weights FILE gives it others."))
        move_networks(networks, self.device)
        query = Query(self.target, self.position, self.detection, self.block, self.layer)
        run_explain(self.images, networks, query, self.out, console)

    def _check(self) -> None:
        if not self.images:
            raise SettingsError("give images: polynl explain IMAGE… with files, or folders of them.")
        # Of a checkpoint's recipe a key may be given; there is none that could have it otherwise.
        if self.keys and not self.checkpoint:
            options = [f"--{name}" for name in _options(self)]
            raise SettingsError(f"there is no option {self.keys[0]}.{near_matches(self.keys[0], options)}")
        if not self.checkpoint and self.model is None:
            raise SettingsError("say what looks at the images: --checkpoint FILE or --model LIBRARY/NAME.")
        if self.model is None and (self.weights is not None or self.insert or self.stride_in_1x1):
            raise SettingsError("--weights, --insert and --stride-in-1x1 belong to --model: give that too.")


@dataclass(frozen=True)
class Report:
    """One page of what is in the folders of runs: report.html, which opens from disk and loads nothing.

    Takes the folders of `polynl reproduce`, `polynl train` and `polynl bench`, in any number and mixture.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The folders."""
    out: Path = Path("report.html")
    """The file to write."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.report.run.run_report`."""
        from polynl.report.run import run_report

        run_report(self.runs, self.out, console)


@dataclass(frozen=True, kw_only=True)
class Reproduce(ReproduceSettings):  # noqa: D101
    __doc__ = ReproduceSettings.__doc__
    keys: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.reproduce.run.run_reproduce`."""
        from polynl.reproduce.run import run_reproduce

        run_reproduce(self, console, self.keys)


@dataclass(frozen=True)
class DataScenes:
    """Write scenes to files: as an ImageFolder, and as a COCO data set with boxes and masks.

    The same options give the same bytes, and the scenes that `data.source: scenes` draws from them.
    """

    out: Path
    """Folder for train/, val/ and annotations/; COCO's file names are relative to train/ and val/."""
    images: int = 1000
    """Scenes to train on."""
    val_images: int = 200
    """Scenes to score on."""
    size: int = 128
    """Side in pixels."""
    difficulty: Literal["easy", "medium", "hard"] = "medium"
    """easy: two figures; medium: also distractors, turned and tinted; hard: three figures, more of it all."""
    seed: int = 0
    """Of the scenes."""
    overwrite: bool = False
    """Replace the scenes in --out."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.data.scenes_export.export_scenes`."""
        from polynl.data.scenes_export import SceneFiles, export_scenes

        scenes = SceneFiles(self.images, self.val_images, self.size, self.difficulty, self.seed)
        export_scenes(scenes, self.out, console, overwrite=self.overwrite)


def _options(command: Train | Evaluate | Explain) -> list[str]:
    """The names of a command's options, which a mistyped key may mean."""
    names = (field.name.replace("_", "-") for field in dataclasses.fields(command))
    return [name for name in names if name not in ("recipe", "keys")]
