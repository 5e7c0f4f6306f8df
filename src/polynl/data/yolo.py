"""YOLO's text labels as COCO annotations.

A data set has a YAML file with the names of its classes and the images of each split, such as
`train: images/train`. The labels of `…/images/a.jpg` are in `…/labels/a.txt`, a line for each object: the
number of its class and centre, width and height of its box as fractions of the image's sides; or the class
and the corners of a polygon. An image without a file, or with an empty one, has no objects.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from polynl.data.annotation_files import is_count, read_lines
from polynl.data.images import IMAGE_SUFFIXES, UnreadableImageError, image_size
from polynl.errors import SettingsError, shown
from polynl.files import write_atomically

SPLITS = ("train", "val")
# As in ultralytics: rounding may take a fraction a little beyond the image.
_MOST = 1.01
_OBJECT = "class cx cy w h, or class x y x y x y …, with coordinates from 0 to 1"


@dataclass(frozen=True)
class YoloSplit:
    """The images of a split in the order of their paths, and the folder that all of them are in."""

    name: str
    folder: Path
    images: tuple[Path, ...]


@dataclass(frozen=True)
class YoloData:
    """What the YAML file of a data set says."""

    path: Path
    names: dict[int, str]
    """The names of the classes."""
    splits: tuple[YoloSplit, ...]


def export_yolo(file: Path, out: Path | None, console: Console, *, overwrite: bool = False) -> None:
    """Write `instances_train.json` and `instances_val.json`; nothing is written if any label is wrong.

    `file`: the YAML file, or its folder. `out`: a folder (default: `annotations` next to the file).
    """
    data = read_yolo(file / "data.yaml" if file.is_dir() else file)
    folder = data.path.parent / "annotations" if out is None else out
    paths = {split.name: folder / f"instances_{split.name}.json" for split in data.splits}
    if not overwrite and (there := [path for path in paths.values() if path.exists()]):
        raise SettingsError(
            f"{there[0]} already exists: replace it with --overwrite, or choose another --out."
        )
    contents = {split.name: coco_of_yolo(data, split, console) for split in data.splits}
    for name, content in contents.items():
        write_atomically(paths[name], json.dumps(content) + "\n")
    _tell(data, contents, folder, console)


def read_yolo(path: Path) -> YoloData:
    """The YAML file of a data set; a SettingsError says what is wrong with it."""
    try:
        content = yaml.safe_load("\n".join(read_lines(path)))
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: expected keys such as train, val and names, got {shown(content)}.")
    if "kpt_shape" in content:
        raise SettingsError(f"{path} has kpt_shape: labels with keypoints cannot be converted.")
    names = _names(path, content.get("names"))
    count = content.get("nc", len(names))
    if count != len(names):
        raise SettingsError(f"{path}: nc is {shown(count)}, and there are {len(names)} names.")
    root = path.parent / str(content.get("path") or "")
    return YoloData(path, names, tuple(_split(path, root, name, content.get(name)) for name in SPLITS))


def coco_of_yolo(data: YoloData, split: YoloSplit, console: Console) -> dict[str, Any]:
    """The labels of a split as COCO's images, annotations and categories; class 0 has the id 1."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    silent = not console.is_terminal
    for path in track(split.images, split.name, console=console, transient=True, disable=silent):
        try:
            width, height = image_size(path)
        except UnreadableImageError as error:
            raise SettingsError(f"{error}.") from None
        number = len(images) + 1
        name = path.relative_to(split.folder).as_posix()
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for label, points in _objects(labels_file(path), data.names):
            shape = _shape(points, width, height)
            entry = {"id": len(annotations) + 1, "image_id": number, "category_id": label + 1}
            annotations.append({**entry, **shape, "iscrowd": 0})
    if not annotations:
        expected = labels_file(split.images[0])
        raise SettingsError(f"no image in {split.folder} has labels: the first one's would be in {expected}.")
    categories = [{"id": label + 1, "name": name} for label, name in sorted(data.names.items())]
    return {"images": images, "annotations": annotations, "categories": categories}


def labels_file(image: Path) -> Path:
    """The labels of an image: the last folder `images` of its path becomes `labels`.

    >>> labels_file(Path("coco/images/val/a.jpg")).as_posix()
    'coco/labels/val/a.txt'
    """
    parts = list(image.parts)
    folders = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    if folders:
        parts[folders[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


# The YAML file


def _names(path: Path, names: Any) -> dict[int, str]:
    """The names of classes, from a list or by number."""
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        raise SettingsError(f"{path}: names is {shown(names)}: expected the names of the classes.")
    for number, name in names.items():
        if type(number) is not int or number < 0:
            raise SettingsError(f"{path}: names has the class {shown(number)}: expected numbers from 0 on.")
        if not isinstance(name, str):
            raise SettingsError(f"{path}: the name of class {number} is {shown(name)}: put it in quotes.")
    return names


def _split(path: Path, root: Path, name: str, places: Any) -> YoloSplit:
    """The images of a split: a folder, a text file of paths, or a list of these."""
    listed = [places] if isinstance(places, str) else places
    if not isinstance(listed, list) or not listed or not all(isinstance(place, str) for place in listed):
        raise SettingsError(f"{path}: {name} is {shown(places)}: expected a folder of images, or several.")
    sources = [_place(path, root, name, place) for place in listed]
    images = sorted({image for source in sources for image in _images(source)})
    if not images:
        raise SettingsError(f"{path}: {name}: there is no image in {sources[0]}.")
    folder = os.path.commonpath([image.parent for image in images])
    single = len(sources) == 1 and sources[0].is_dir()
    return YoloSplit(name, sources[0] if single else Path(folder), tuple(images))


def _place(path: Path, root: Path, name: str, place: str) -> Path:
    """A folder or text file, relative to `path` of the YAML file or to the file itself.

    Some programs write paths as seen from a folder in the data set: `../train/images`.
    """
    tried = [base / place for base in (root, path.parent)]
    tried += [base / place.removeprefix("../") for base in (root, path.parent)]
    for candidate in tried:
        if candidate.exists():
            return Path(os.path.abspath(candidate))
    raise SettingsError(f"{path}: {name}: no such folder or file: {tried[0]}.")


def _images(source: Path) -> Iterator[Path]:
    if source.is_dir():
        files = (Path(folder) / name for folder, _, names in os.walk(source) for name in names)
        # macOS writes a file "._a.jpg" next to "a.jpg" on some disks.
        yield from (file for file in files if file.suffix.lower() in IMAGE_SUFFIXES and file.name[0] != ".")
        return
    for number, line in enumerate(read_lines(source), 1):
        if line.strip():
            image = Path(os.path.abspath(source.parent / line.strip()))
            if not image.is_file():
                raise SettingsError(f"{source}, line {number}: no such image: {image}.")
            yield image


# Labels


def _objects(path: Path, names: Mapping[int, str]) -> dict[tuple[int, tuple[float, ...]], None]:
    """The class and coordinates of every object of a file; a line that is there twice counts once."""
    found: dict[tuple[int, tuple[float, ...]], None] = {}
    for number, line in enumerate(read_lines(path) if path.exists() else (), 1):
        words = line.split()
        if not words:
            continue
        if wrong := _wrong_line(words, names):
            raise SettingsError(f"{path}, line {number}: {shown(line.strip())}: {wrong}.")
        found[int(float(words[0])), tuple(map(float, words[1:]))] = None
    return found


def _wrong_line(words: list[str], names: Mapping[int, str]) -> str | None:
    # Some programs write the class as 0.0.
    label = words[0].removesuffix(".0")
    try:
        values = [float(word) for word in words[1:]]
    except ValueError:
        values = []
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        return f"expected {_OBJECT}"
    if not is_count(label) or int(label) not in names:
        return f"{words[0]} is not a class: expected one of the {len(names)} numbers in names"
    for value in values:
        if not -_MOST + 1 <= value <= _MOST:
            return f"{value:g} is not a fraction of the image's side: expected {_OBJECT}"
    if len(values) == 4 and min(values[2:]) <= 0:
        return "the box has no extent: expected a width and height above 0"
    return None


def _shape(values: tuple[float, ...], width: int, height: int) -> dict[str, Any]:
    """The box in pixels, clipped to the image, with its area; of a polygon, also the segmentation."""
    if len(values) == 4:
        x, y, across, down = values
        corners = [(x - across / 2, y - down / 2), (x + across / 2, y + down / 2)]
    else:
        corners = list(zip(values[::2], values[1::2], strict=True))
    pixels = [(_clipped(x) * width, _clipped(y) * height) for x, y in corners]
    (left, right), (top, bottom) = ((min(axis), max(axis)) for axis in zip(*pixels, strict=True))
    box = [_rounded(side) for side in (left, top, right - left, bottom - top)]
    if len(values) == 4:
        return {"bbox": box, "area": _rounded(box[2] * box[3])}
    following = [*pixels[1:], pixels[0]]
    area = sum(a * d - b * c for (a, b), (c, d) in zip(pixels, following, strict=True)) / 2
    polygon = [_rounded(side) for pixel in pixels for side in pixel]
    return {"bbox": box, "area": _rounded(math.fabs(area)), "segmentation": [polygon]}


def _clipped(fraction: float) -> float:
    return min(max(fraction, 0.0), 1.0)


def _rounded(pixels: float) -> float:
    return round(pixels, 3)


def _tell(data: YoloData, contents: Mapping[str, Any], folder: Path, console: Console) -> None:
    root = Path(os.path.abspath(data.path.parent))
    words, lines = ["--data.root", str(root)], []
    for split in data.splits:
        content, file = contents[split.name], Path(os.path.abspath(folder)) / f"instances_{split.name}.json"
        empty = len(split.images) - len({entry["image_id"] for entry in content["annotations"]})
        lines.append(
            f"{file}: {len(split.images):,} images, {len(content['annotations']):,} objects, "
            f"{empty:,} images without any"
        )
        for key, path in ((split.name, split.folder), (f"{split.name}-annotations", file)):
            inside = path.relative_to(root) if path.is_relative_to(root) else path
            words += [f"--data.{key}", str(inside)]
    lines.append(f"polynl train boxes_small {shlex.join(words)} --model.backbone-weights FILE")
    console.print(escape("\n".join(lines)), highlight=False, soft_wrap=True)
