"""`polynl data`: create and convert data sets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import OmitArgPrefixes, Positional

from polynl.commands.options import DIR, FILE
from polynl.data.config import SceneFiles


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


@dataclass(frozen=True)
class DataYolo:
    """Convert YOLO's text labels to COCO annotations.

    Images stay where they are. Labels that are polygons become masks as well as boxes.
    """

    data: Annotated[Positional[Path], FILE]
    """The data set's YAML file, with train, val and names, or a folder that has it as data.yaml."""
    out: Annotated[Path | None, DIR] = None
    """Folder for instances_train.json and instances_val.json (default: annotations, next to the file)."""
    overwrite: bool = False
    """Replace the annotations in --out."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.data.yolo.export_yolo`."""
        from polynl.data.yolo import export_yolo

        export_yolo(self.data, self.out, console, overwrite=self.overwrite)
