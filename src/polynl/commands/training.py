"""Commands that train and score networks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, arg

from polynl.commands.options import DIR, FILE, Keys, RecipeName, option_names
from polynl.errors import SettingsError, check_resume_or_overwrite
from polynl.reproduce.settings import ReproduceSettings


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
        recipe = load_recipe(self.recipe, self.keys, option_names(self))
        if self.list_keys:
            console.print(keys_table(recipe))
            return
        out = default_folder(find_recipe(self.recipe), recipe) if self.out is None else self.out
        train(recipe, out, console, resume=self.resume, overwrite=self.overwrite)


@dataclass(frozen=True)
class Evaluate:
    """Score a run, or a checkpoint on the validation images of a recipe.

    It can run under torchrun. Keys of the recipe can be overridden:
      polynl evaluate runs/scenes/poly_nl-res4
      polynl evaluate scenes --checkpoint FILE --data.val-images 5000
    """

    recipe: Annotated[Positional[str], arg(metavar="RUN|RECIPE")]
    """Folder of a run or of polynl share, weights in one, or recipe file or name; must come first."""
    checkpoint: Annotated[Path | None, FILE] = None
    """Checkpoint or weights to score, as safetensors or a state dict (default: the best of the run)."""
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
        from polynl.train.recipe_file import find_recipe, load_recipe
        from polynl.train.run_folder import checkpoint_in, find_run, recipe_of_run

        run = find_run(self.recipe)
        if run is None:
            find_recipe(self.recipe)
        checkpoint = self.checkpoint
        if run is not None and checkpoint is None and self.detections is None:
            checkpoint = checkpoint_in(run) if run.is_dir() else run
        if (checkpoint is None) == (self.detections is None):
            raise SettingsError(
                "specify what to score: --checkpoint FILE or --detections PATH, or a run instead of a recipe."
            )
        options = option_names(self)
        if run is None:
            recipe = load_recipe(self.recipe, self.keys, options)
        else:
            recipe = recipe_of_run(run, self.keys, options)
        if checkpoint is not None:
            evaluate_checkpoint(recipe, checkpoint, self.out, console, save_detections=self.save_detections)
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


@dataclass(frozen=True, kw_only=True)
class Reproduce(ReproduceSettings):  # noqa: D101
    __doc__ = ReproduceSettings.__doc__
    keys: Keys = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.reproduce.run.run_reproduce`."""
        from polynl.reproduce.run import run_reproduce

        run_reproduce(self, console, self.keys)
