"""What the options of several commands share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, Suppress, arg

FILE, DIR = arg(metavar="FILE"), arg(metavar="DIR")
RecipeName = Annotated[Positional[str], arg(metavar="RECIPE")]
OptionalRecipe = Annotated[str | None, arg(metavar="RECIPE")]
OptionalModule = Annotated[str | None, arg(metavar="MODULE")]
Images = Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE …")]
# Options of the recipe, which `polynl.cli` collects.
Keys = Suppress[tuple[str, ...]]


def option_names(command: Any) -> list[str]:
    """The names of a command's options, suggested for mistyped keys."""
    names = (field.name.replace("_", "-") for field in dataclasses.fields(command))
    return [name for name in names if name not in ("recipe", "keys")]
