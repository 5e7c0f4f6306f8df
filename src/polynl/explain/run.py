"""`polynl explain`: figures of what networks attend to in images."""

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
from polynl.explain.explanation import Explanation, Query, explain_image
from polynl.explain.figures import DPI, FIGURES
from polynl.explain.networks import ExplainedNetwork
from polynl.files import output_folder, write_atomically


def run_explain(
    paths: Sequence[Path], networks: Sequence[ExplainedNetwork], query: Query, out: Path, console: Console
) -> list[list[Explanation]]:
    """Explain every image by every network and write the figures; returns explanations, image by image."""
    images = image_files(paths)
    names = names_apart(images)
    check_originals_stay(images, [out / f"{name}-{kind}.png" for name in names for kind in FIGURES])
    _check_options(networks, query)
    # Classifiers accept thin images, detectors do not.
    read = read_for_detector if any(network.detects for network in networks) else read_image
    explanations: list[list[Explanation]] = []
    with output_folder(out):
        for path, name in zip(images, names, strict=True):
            try:
                image = read(path, upright=True)
            except UnreadableImageError as error:
                _print(console, f"skipped: {error}")
                continue
            try:
                explanations.append([explain_image(network, image, query) for network in networks])
            except SettingsError as error:
                raise SettingsError(f"{path}: {error}") from error
            written = _write_figures(explanations[-1], out, name)
            _print_summary(path, explanations[-1], written, console)
    if len(explanations) < len(images):
        unreadable = len(images) - len(explanations)
        raise RunStoppedError(f"{unreadable} of {len(images)} images could not be read, see above.")
    return explanations


def move_networks(networks: Sequence[ExplainedNetwork], device: str) -> None:
    """Move the networks to a device; "auto" is a GPU if there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: no CUDA device is available.")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    for network in networks:
        network.model.to(name)


def _check_options(networks: Sequence[ExplainedNetwork], query: Query) -> None:
    """Raise a SettingsError for an option that applies to none of the networks."""
    names = ", ".join(network.name for network in networks)
    if query.block is not None and all(network.block is None for network in networks):
        raise SettingsError(f"--block {query.block}: there is no block in {names}.")
    if query.target is not None and all(network.detects for network in networks):
        raise SettingsError(f"--target {query.target} is for classifiers; use --detection for {names}.")
    if query.detection is not None and not any(network.detects for network in networks):
        raise SettingsError(f"--detection {query.detection} is for detectors; use --target for {names}.")


def _write_figures(explanations: Sequence[Explanation], out: Path, name: str) -> list[Path]:
    written = []
    with matplotlib.rc_context({"font.size": 10}):
        for kind, draw in FIGURES.items():
            if figure := draw(explanations):
                png = io.BytesIO()
                figure.savefig(png, dpi=DPI, bbox_inches="tight")
                written.append(out / f"{name}-{kind}.png")
                write_atomically(written[-1], png.getbuffer())
    return written


def _print_summary(
    path: Path, explanations: Sequence[Explanation], written: Sequence[Path], console: Console
) -> None:
    for explanation in explanations:
        parts = [f"{path}: {explanation.title}: {explanation.said}", *explanation.notes]
        if explanation.added is not None:
            parts.append(f"added by its block: {explanation.added}")
        _print(console, "; ".join(parts))
    names = ", ".join(file.name for file in written)
    _print(console, f"  {written[0].parent}: {names}" if written else "  nothing to draw")


def _print(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
