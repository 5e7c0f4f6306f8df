"""`polynl report`: from folders of results to one file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from polynl.errors import SettingsError
from polynl.files import check_destination, write_atomically
from polynl.report.page import page
from polynl.report.pictures import Pictures, pictures_of
from polynl.results.load import EXPECTED, Gathered, few, gathered

REPORT = "report.html"


def run_report(runs: Sequence[Path], out: Path, console: Console) -> Path:
    """Write the page of what is in the folders; gives its path."""
    if not runs:
        raise SettingsError(f"name the folders to report: {EXPECTED}.")
    check_destination(out, "file", "--out")
    found = gathered(runs)
    pictures = _pictures(found, console)
    title = found.studies[0].title if len(found.studies) == 1 else few([run.resolve().name for run in runs])
    text = page(found, pictures, title, shlex.join(["polynl", *sys.argv[1:]]))
    write_atomically(out, text)
    size = f"{len(text.encode()) / 1e6:.2f} MB"
    console.print(
        escape(f"The report is in {out} ({size}): open it in a browser."), highlight=False, soft_wrap=True
    )
    return out


def _pictures(found: Gathered, console: Console) -> list[Pictures]:
    """Of every study; what could not be made is said here too."""
    made = []
    for study in found.studies:
        console.print(escape(f"Drawing what the networks look at: {study.title} …"), highlight=False)
        made.append(pictures_of(study))
        for line in made[-1].missing:
            console.print(escape(f"No pictures: {line}"), highlight=False, soft_wrap=True)
    return made
