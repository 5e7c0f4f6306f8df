"""`polynl explain`: what networks look at in images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.markup import escape

from polynl.data.images import (
    UnreadableImageError,
    check_originals_stay,
    image_files,
    names_apart,
    read_for_detector,
    read_image,
)
from polynl.errors import RunStoppedError, SettingsError
from polynl.explain.explanation import Answer, Question, answer
from polynl.explain.figures import FIGURES
from polynl.explain.networks import Subject
from polynl.files import make_folder, write_atomically


def run_explain(
    paths: Sequence[Path], subjects: Sequence[Subject], question: Question, out: Path, console: Console
) -> list[list[Answer]]:
    """Draw what every network looks at in every image; gives all answers, image by image."""
    images = image_files(paths)
    names = names_apart(images)
    check_originals_stay(images, [out / f"{name}-{kind}.png" for name in names for kind in FIGURES])
    _check_options(subjects, question)
    make_folder(out)
    # Only detectors cannot do with thin images.
    read = read_for_detector if any(subject.detects for subject in subjects) else read_image
    answers: list[list[Answer]] = []
    for path, name in zip(images, names, strict=True):
        try:
            image = read(path, upright=True)
        except UnreadableImageError as error:
            console.print(escape(f"skipped: {error}"), highlight=False, soft_wrap=True)
            continue
        try:
            answers.append([answer(subject, image, question) for subject in subjects])
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from error
        written = _draw(answers[-1], out, name)
        _tell(path, answers[-1], written, console)
    if len(answers) < len(images):
        unreadable = len(images) - len(answers)
        raise RunStoppedError(f"{unreadable} of {len(images)} images could not be read, see above.")
    return answers


def on_device(subjects: Sequence[Subject], device: str) -> None:
    """Move the networks; "auto" is a GPU where there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: PyTorch sees no CUDA device here.")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    for subject in subjects:
        subject.model.to(where)


def _check_options(subjects: Sequence[Subject], question: Question) -> None:
    """Raise a SettingsError for an option that none of the networks can take."""
    names = ", ".join(subject.name for subject in subjects)
    if question.block is not None and all(subject.block is None for subject in subjects):
        raise SettingsError(f"--block {question.block}: no block is in {names}.")
    if question.target is not None and all(subject.detects for subject in subjects):
        raise SettingsError(f"--target {question.target}: {names} finds boxes; --detection chooses one.")
    if question.detection is not None and not any(subject.detects for subject in subjects):
        raise SettingsError(
            f"--detection {question.detection}: {names} finds no boxes; --target is for classes."
        )


def _draw(answers: Sequence[Answer], out: Path, name: str) -> list[Path]:
    written = []
    with matplotlib.rc_context({"font.size": 10}):
        for kind, draw in FIGURES.items():
            figure = draw(answers)
            if figure is not None:
                png = io.BytesIO()
                figure.savefig(png, dpi=130, bbox_inches="tight")
                written.append(out / f"{name}-{kind}.png")
                write_atomically(written[-1], png.getbuffer())
    return written


def _tell(path: Path, answers: Sequence[Answer], written: Sequence[Path], console: Console) -> None:
    for found in answers:
        parts = [f"{path}: {found.title}: {found.said}", *found.remarks]
        if found.norms is not None and not found.norms.y.any():
            parts.append("its block adds nothing: it is new, or was not trained")
        console.print(escape("; ".join(parts)), highlight=False, soft_wrap=True)
    names = ", ".join(picture.name for picture in written)
    drawn = f"  {written[0].parent}: {names}" if written else "  nothing to draw"
    console.print(escape(drawn), highlight=False, soft_wrap=True)
