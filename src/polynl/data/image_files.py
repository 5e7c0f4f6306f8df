"""Images that are named on a command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from polynl.errors import SettingsError, near_matches

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"}


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The files, and those in the folders."""
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()
            )
            if not inside:
                raise SettingsError(f"there is no image in the folder {path}.")
            images += inside
        elif path.is_file():
            images.append(path)
        else:
            there = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            raise SettingsError(f"there is no image {path}.{near_matches(path.name, there)}")
    return images


def names_apart(images: Sequence[Path]) -> list[str]:
    """A name for each, that of its file; images of one name in several folders get numbers."""
    names: list[str] = []
    for image in images:
        name, number = image.stem, 1
        while name in names:
            number += 1
            name = f"{image.stem}_{number}"
        names.append(name)
    return names


def check_originals_stay(images: Sequence[Path], pictures: Iterable[Path]) -> None:
    """Raise a SettingsError where a picture would be written over an image."""
    originals = {image.resolve() for image in images}
    for picture in pictures:
        if picture.resolve() in originals:
            raise SettingsError(f"--out: {picture} is one of the images; choose a folder for the pictures.")
