"""A trained network with all that is needed to use it, and to give it to others."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from torch import Tensor, nn

from polynl.data.images import check_not_thin, from_pil, read_image
from polynl.errors import SettingsError
from polynl.extras import missing_extra_named
from polynl.files import write_atomically
from polynl.models.about import About, structure_of
from polynl.predict.guesses import Guess, most_probable
from polynl.sharing.card import model_card, recorded_scores
from polynl.tasks.base import DetectionTask, Task
from polynl.tasks.detections import Detections
from polynl.train.about import portable
from polynl.train.checkpoint import SHARED_WEIGHTS, export_weights
from polynl.train.config import Recipe
from polynl.train.processes import autocast
from polynl.train.run_folder import find_trained

CONFIG, CARD = "config.json", "README.md"
AnyImage = str | os.PathLike[str] | Image.Image | Tensor


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A trained network in eval mode; `model(preprocess(image))` is its output."""

    model: nn.Module
    labels: dict[int, str]
    """Names of classes or categories by the numbers that `predict` returns."""
    recipe: Recipe
    """What it was trained with."""
    task: Task
    about: About
    """What is saved with its weights: structure, recipe, labels, scores."""
    checkpoint: Path

    def preprocess(self, image: AnyImage) -> Tensor | list[Tensor]:
        """The model's input, on the CPU.

        It is (1, 3, h, w) for a classifier, and a list of one (3, h, w) for a detector. `image` is a file, an
        image of PIL, or a uint8 tensor (3, h, w).
        """
        return self.task.inputs(self.task.view()(self._pixels(image)))

    def predict(
        self, image: AnyImage, *, top: int | None = None, threshold: float | None = None
    ) -> list[Guess] | Detections:
        """The `top` (default: 5) classes, or the detections scoring at least `threshold` (default: 0.5).

        A class is (number, name, probability). Detections have boxes (k, 4) in pixels of the image, scores,
        labels and, if the network finds masks, those.
        """
        if top is not None and top < 1:
            raise ValueError(f"top={top!r}: expected a number above 0")
        device = next(self.model.parameters()).device
        pixels = self._pixels(image).to(device)
        with torch.no_grad(), autocast(self.recipe, device):
            if isinstance(self.task, DetectionTask):
                if top is not None:
                    raise ValueError(f"top={top!r} is for classifiers; use threshold for detectors")
                (found,) = self.task.detect(self.model, [pixels])
                return found.above(0.5 if threshold is None else threshold).cpu()
            if threshold is not None:
                raise ValueError(f"threshold={threshold!r} is for detectors; use top for classifiers")
            (logits,) = self.model(self.task.inputs(self.task.view()(pixels)))
        return most_probable(logits, self.labels, 5 if top is None else top)

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, name: str | None = None, license: str | None = None
    ) -> Path:
        """Write model.safetensors, config.json and a model card, README.md, and return the folder.

        `name` is what the card says to load (default: the folder's name), `license` an identifier such as
        "mit". Files of these names are replaced.
        """
        folder = Path(folder)
        if folder.resolve() == self.checkpoint.resolve().parent:
            raise SettingsError(f"{folder} is the folder that this was loaded from; choose another.")
        if folder.is_file():
            raise SettingsError(f"{folder} is a file; expected a folder.")
        card = model_card(self, folder.resolve().name if name is None else name, license)
        config = {"library_name": "polynl", **json.loads(self.about.to_json())}
        del config["structure"]  # for programs; it is with the weights
        export_weights(folder / SHARED_WEIGHTS, self.model.state_dict(), self.about)
        write_atomically(folder / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        write_atomically(folder / CARD, card)
        return folder

    def push_to_hub(
        self,
        repo_id: str,
        *,
        license: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a network of polynl",
    ) -> str:
        """Upload what `save_pretrained` writes to a repository "user/name", and return its address.

        The repository is created if it does not exist. Log in with `hf auth login`, or pass a `token`.
        """
        with missing_extra_named():
            from polynl.sharing.hub import upload

        with TemporaryDirectory() as folder:
            files = self.save_pretrained(Path(folder, "files"), name=repo_id, license=license)
            return upload(
                files, repo_id, private=private, token=token, revision=revision, message=commit_message
            )

    def _pixels(self, image: AnyImage) -> Tensor:
        """The image as uint8 (3, h, w), upright."""
        if isinstance(image, Tensor):
            if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
                raise ValueError(f"image: expected uint8 (3, h, w), got {image.dtype} {tuple(image.shape)}")
            pixels = image
        elif isinstance(image, Image.Image):
            pixels = from_pil(image, upright=True)
        elif isinstance(image, str | os.PathLike):
            pixels = read_image(image, upright=True)
        else:
            kind = type(image).__name__
            raise TypeError(
                f"image is a {kind}; expected a file, an image of PIL or a uint8 tensor (3, h, w)"
            )
        if isinstance(self.task, DetectionTask):
            check_not_thin(pixels, "the image" if isinstance(image, Image.Image | Tensor) else str(image))
        return pixels


def load(
    path: str | os.PathLike[str],
    *,
    recipe: str | None,
    overrides: Sequence[str],
    labels: str | os.PathLike[str] | None,
    device: str,
    allow_import: bool,
) -> LoadedRun:
    """See :func:`polynl.load_run`."""
    path = Path(path)
    if not path.exists():
        raise SettingsError(f"there is no run or file of weights {path}.")
    try:
        names = None if labels is None else Path(labels)
        trained = find_trained(path, recipe, overrides, labels=names, allow_import=allow_import)
        model = trained.load(torch.device(device))
    except SettingsError as error:
        raise SettingsError(str(error).removeprefix("--checkpoint: ").removeprefix("--")) from error
    about = trained.about
    if about is None:  # weights from before files had it
        about = About({}, portable(trained.recipe), trained.task.labels())
        about = replace(about, **recorded_scores(trained.checkpoint, trained.task))
    about = replace(about, structure=structure_of(model))
    task = trained.task
    shown = task.labels() if isinstance(task, DetectionTask) else task.output_labels()
    return LoadedRun(model, shown, trained.recipe, trained.task, about, trained.checkpoint)
