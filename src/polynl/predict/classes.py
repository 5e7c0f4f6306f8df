"""The most probable classes of images: a contact sheet, and the same as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polynl.data.images import read_image
from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.predict.contact_sheet import Tile, contact_sheet
from polynl.predict.guesses import Guess, most_probable
from polynl.tasks.base import Task

SHEET, TABLE, PREDICTIONS = "contact_sheet.png", "predictions.csv", "predictions.json"
# More would not fit on a screen, nor into memory.
MOST_TILES = 100


class ClassTable:
    """The `top` most probable classes of images, for a CSV and a JSON file."""

    def __init__(self, names: Mapping[int, str], out: Path, *, top: int) -> None:
        if top < 1:
            raise SettingsError(f"--top {top}: expected a number above 0.")
        self._names, self._out, self._top = names, out, top
        self.content: dict[str, Any] = {"images": []}

    def add(self, path: Path, logits: Tensor) -> list[Guess]:
        """The classes of an image, which become rows of the table."""
        guesses = most_probable(logits, self._names, self._top)
        self.content["images"].append(
            {"file_name": str(path), "predictions": [guess._asdict() for guess in guesses]}
        )
        return guesses

    def save(self) -> None:
        """Write the two files."""
        write_atomically(self._out / TABLE, self._rows())
        content = json.dumps(self.content, indent=1, ensure_ascii=False)
        write_atomically(self._out / PREDICTIONS, content + "\n")

    def _rows(self) -> str:
        """A row for every image and class, the most probable first."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["image", "rank", *Guess._fields])
        for image in self.content["images"]:
            for rank, guess in enumerate(image["predictions"], start=1):
                table.writerow([image["file_name"], rank, *guess.values()])
        return text.getvalue()


class ClassPredictor:
    """Collects the `top` most probable classes of every image."""

    def __init__(self, task: Task, out: Path, *, top: int) -> None:
        self._task, self._out, self._view = task, out, task.view()
        self._table = ClassTable(task.output_labels(), out, top=top)
        self._tiles: list[Tile] = []

    @property
    def content(self) -> dict[str, Any]:
        """What the JSON file contains."""
        return self._table.content

    def pictures(self, names: Sequence[str]) -> list[Path]:
        """One for all images."""
        return [self._out / SHEET]

    def read(self, path: Path) -> Tensor:
        """An image of any shape."""
        return read_image(path, upright=True)

    def add(self, model: nn.Module, path: Path, name: str, image: Tensor) -> str:
        """Classify an image."""
        seen = self._view(image)
        (logits,) = model(self._task.inputs(seen))
        guesses = self._table.add(path, logits)
        if len(self._tiles) < MOST_TILES:
            self._tiles.append(Tile.of(path.name, seen.cpu(), guesses))
        return ", ".join(map(str, guesses))

    def save(self) -> str:
        """Write the three files."""
        png = io.BytesIO()
        if self._tiles:
            contact_sheet(self._tiles).save(png, "png")
            write_atomically(self._out / SHEET, png.getbuffer())
        self._table.save()
        count = len(self.content["images"])
        shown = SHEET if count <= MOST_TILES else f"{SHEET}, of the first {MOST_TILES} of {count} images,"
        return f"{TABLE}, {PREDICTIONS} and {shown} are"
