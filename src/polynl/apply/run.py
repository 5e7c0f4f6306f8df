"""`polynl apply`: class scores, features and influence maps of large images, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from polynl.apply.large import Large, write_influence
from polynl.data.images import UnreadableImageError, check_originals_stay, image_files, names_apart
from polynl.data.large_images import LARGE_SUFFIXES, open_large
from polynl.errors import RunStoppedError, SettingsError, near_matches
from polynl.explain.networks import ExplainedNetwork
from polynl.files import output_folder
from polynl.predict.classes import PREDICTIONS, TABLE, ClassTable


@dataclass(frozen=True)
class Request:
    """What to write of every image; without features and influence, its classes."""

    tile: int = 1024
    keep: bool = False
    top: int = 5
    features: str | None = None
    influence: tuple[float, float] | None = None
    block: str | None = None

    def files(self, out: Path, name: str) -> list[Path]:
        """The arrays that will be written of an image: features, and then influence."""
        maps = [None if self.features is None else f"{name}-{self.features}.npy"]
        maps += [None if self.influence is None else f"{name}-influence.npy"]
        return [out / file for file in maps if file is not None]


def run_apply(
    paths: Sequence[Path], network: ExplainedNetwork, request: Request, out: Path, console: Console
) -> None:
    """Run the network on every image and write what was requested."""
    images = [file for path in paths for file in large_files(path)]
    names = names_apart(images)
    _check(network, request)
    check_originals_stay(images, [file for name in names for file in request.files(out, name)])
    table = ClassTable(network.labels, out, top=request.top)
    unreadable = 0
    with output_folder(out):
        for path, name in zip(images, names, strict=True):
            try:
                said = f"{path}: {_applied(path, name, network, request, out, table)}"
            except UnreadableImageError as error:
                said = f"skipped: {error}"
                unreadable += 1
            except SettingsError:
                raise
            except ValueError as error:  # a network that cannot be run in tiles, or a tile that is too small
                raise SettingsError(f"{path}: {error}.") from error
            _print(console, said)
        if table.content["images"]:
            table.save()
            _print(console, f"{TABLE} and {PREDICTIONS} are in {out}.")
    if unreadable:
        raise RunStoppedError(f"{unreadable} of {len(images)} images could not be read, see above.")


def _applied(
    path: Path, name: str, network: ExplainedNetwork, request: Request, out: Path, table: ClassTable
) -> str:
    """Write what was requested of an image; returns what was found or written, in words."""
    files = iter(request.files(out, name))
    said = []
    with open_large(path) as reader:
        large = Large(reader, network, request.tile, out, request.keep)
        if request.features is not None:
            file = next(files)
            shape = " × ".join(map(str, large.features(request.features, file).shape))
            said.append(f"{file} has the output of {request.features}, {shape}")
        if request.influence is not None:
            file = next(files)
            shares = large.influence(request.block, request.influence)
            write_influence(large, shares, request.influence, file)
            said.append(f"{file} and {file.with_suffix('.png').name} have the influence map")
        if not said:
            said.append(", ".join(map(str, table.add(path, large.logits()))))
    return "; ".join(said)


def large_files(path: Path) -> list[Path]:
    """The image that a path is, a zarr array among them, or the images in that folder."""
    if path.suffix.lower() == ".zarr" and path.is_dir():
        return [path]
    large = [f for f in sorted(path.iterdir()) if f.suffix.lower() in LARGE_SUFFIXES] if path.is_dir() else []
    try:
        return sorted({*large, *image_files([path])})
    except SettingsError:
        if large:
            return large
        raise


def _check(network: ExplainedNetwork, request: Request) -> None:
    """Raise a SettingsError if the request does not fit the network."""
    if network.detects:
        raise SettingsError(
            f"{network.name} is a detector, which resizes images and crops boxes out of maps: this cannot be "
            "done in tiles. Use polynl predict."
        )
    names = [name for name, _ in network.model.named_modules() if name]
    if request.features is not None and request.features not in names:
        hint = near_matches(request.features, names)
        raise SettingsError(f"--features: {network.name} has no module {request.features!r}.{hint}")
    if request.block is not None and request.influence is None:
        raise SettingsError(f"--block {request.block} needs --influence X Y.")


def _print(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
