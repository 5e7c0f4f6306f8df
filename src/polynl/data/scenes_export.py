"""Scenes as files: an ImageFolder, and a COCO data set of the same images."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torchvision.ops import box_convert
from torchvision.transforms.v2.functional import to_pil_image

from polynl.data.config import SceneFiles, Split
from polynl.data.scenes import CATEGORIES, CLASSES, SPLITS, Instances, draw_scenes
from polynl.errors import RunStoppedError, SettingsError
from polynl.files import write_atomically

ANNOTATIONS = "annotations"
# Everything is written here first, and moved when it is complete.
UNFINISHED = ".unfinished"
DESCRIPTION = "scenes drawn by polynl"
# How the annotations of an export start: other files are never overwritten.
_OURS = f'{{"info": {{"description": "{DESCRIPTION}"'
# Options that the annotations name, in this order.
_OPTIONS = ("images", "val_images", "size", "difficulty", "seed")


def export_scenes(scenes: SceneFiles, out: Path, console: Console, *, overwrite: bool = False) -> None:
    """Write scenes to the folder `out`; the same options give the same bytes.

    ImageFolder: `train/<class>/000123.png` and `val/<class>/000123.png`. COCO:
    `annotations/instances_train.json` and `instances_val.json`, whose file names are relative to `train` and
    `val`. Every item is annotated: figures, distractors and the cue.

    Everything is written to `.unfinished` in `out` and moved when it is complete, the annotations last. So a
    folder with annotations is complete, even after a kill. With `overwrite`, an earlier export stays until
    the new one is complete.
    """
    _check_free(out, overwrite=overwrite)
    try:
        missing = _write(scenes, out / UNFINISHED, console)
        for name in (ANNOTATIONS, *SPLITS):
            _remove(out / name)
        for name in (*SPLITS, ANNOTATIONS):
            os.replace(out / UNFINISHED / name, out / name)
        (out / UNFINISHED).rmdir()
    except OSError as error:
        raise RunStoppedError(f"{out} cannot be written to: {error.strerror or error}.") from error
    _tell(scenes, out, missing, console)


def coco_content(scenes: Iterable[tuple[int, Instances]], *, size: int) -> dict[str, Any]:
    """Scenes (a label and the items) as COCO's categories, images and annotations."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (label, items) in enumerate(scenes):
        sides = {"width": size, "height": size}
        name = _file_name(number, label)
        images.append({"id": number, "file_name": name, **sides, "label": CLASSES[label]})
        boxes = box_convert(items.boxes, "xyxy", "xywh").int().tolist()
        annotations += [
            {
                "id": place,
                "image_id": number,
                "category_id": category + 1,
                "bbox": box,
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": {"size": list(mask.shape), "counts": run_lengths(mask)},
            }
            for place, (mask, box, category) in enumerate(
                zip(items.masks, boxes, items.categories.tolist(), strict=True), len(annotations) + 1
            )
        ]
    categories = [{"id": number, "name": name} for number, name in enumerate(CATEGORIES, 1)]
    return {"categories": categories, "images": images, "annotations": annotations}


def run_lengths(mask: Tensor) -> list[int]:
    """COCO's uncompressed RLE of a mask (h, w): column by column, lengths of runs of 0, of 1, of 0, ….

    >>> run_lengths(torch.tensor([[0, 1], [0, 1], [1, 0]]))
    [2, 3, 1]
    >>> run_lengths(torch.tensor([[1, 1]]))
    [0, 2]
    """
    flat = mask.mT.flatten().int()
    (starts,) = torch.where(flat.diff(prepend=flat.new_zeros(1)) != 0)
    edges = torch.cat([starts.new_zeros(1), starts, starts.new_tensor([flat.numel()])])
    return edges.diff().tolist()


def _check_free(out: Path, *, overwrite: bool) -> None:
    """Raise a SettingsError if something in the folder would be lost."""
    annotations = out / ANNOTATIONS / "instances_train.json"
    try:
        names = {entry.name for entry in out.iterdir()}
        if names <= {UNFINISHED}:
            return
        ours = UNFINISHED in names
        if not ours and annotations.is_file():
            with annotations.open("rb") as file:
                ours = file.read(len(_OURS)) == _OURS.encode()
    except FileNotFoundError:
        return
    except OSError as error:
        raise SettingsError(f"--out: {out} cannot be used: {error.strerror}.") from None
    if not ours:
        raise SettingsError(
            f"{out} already contains files that `polynl data scenes` did not write: choose another --out."
        )
    if not overwrite:
        raise SettingsError(
            f"{out} already contains scenes: replace them with --overwrite, or choose another --out."
        )


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _write(scenes: SceneFiles, folder: Path, console: Console) -> list[str]:
    """Write both splits, or nothing; returns the folders of classes that stay empty."""
    _remove(folder)
    folder.mkdir(parents=True)
    columns = (BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with bar:
            for split in SPLITS:
                task = bar.add_task(split, total=scenes.drawn_from(split)["count"])
                _write_split(scenes, split, folder, partial(bar.advance, task))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    classes = [f"{split}/{name}" for split in SPLITS for name in CLASSES]
    return [name for name in classes if not any((folder / name).iterdir())]


def _write_split(scenes: SceneFiles, split: Split, folder: Path, advance: Callable[[], None]) -> None:
    for name in CLASSES:
        (folder / split / name).mkdir(parents=True)

    def written() -> Iterator[tuple[int, Instances]]:
        number = 0
        for batch, pictures in draw_scenes(**scenes.drawn_from(split)):
            for place, (picture, label) in enumerate(zip(pictures, batch.labels.tolist(), strict=True)):
                to_pil_image(picture).save(folder / split / _file_name(number, label))
                yield label, batch.instances(place, scenes.size)
                advance()
                number += 1

    info = {"description": DESCRIPTION, "split": split, **{key: getattr(scenes, key) for key in _OPTIONS}}
    content = {"info": info, **coco_content(written(), size=scenes.size)}
    write_atomically(folder / ANNOTATIONS / f"instances_{split}.json", json.dumps(content) + "\n")


def _file_name(number: int, label: int) -> str:
    return f"{CLASSES[label]}/{number:06}.png"


def _tell(scenes: SceneFiles, out: Path, missing: list[str], console: Console) -> None:
    words = f"--data.size {scenes.size} --data.resize {scenes.size} --data.scale [1,1]"
    lines = [
        f"{scenes.images:,} training and {scenes.val_images:,} validation scenes are in {out}.",
        f"ImageFolder: polynl train folder --data.root {shlex.quote(str(out))} {words}",
        f"COCO: {ANNOTATIONS}/instances_train.json describes train/, instances_val.json val/.",
    ]
    if missing:
        lines.append(
            f"So few scenes leave some classes empty, which ImageFolder refuses: {', '.join(missing)}."
        )
    console.print(escape("\n".join(lines)), highlight=False, soft_wrap=True)
