"""`polynl report`: one HTML page from the folders of runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from polynl.errors import SettingsError, shortened
from polynl.files import check_destination, write_atomically
from polynl.report.load import EXPECTED, LoadedRuns, load_runs
from polynl.report.page import render_page
from polynl.report.pictures import Pictures, study_pictures
from polynl.results.study import Study

REPORT = "report.html"


def run_report(folders: Sequence[Path], out: Path, console: Console) -> Path:
    """Load the folders and write their page; returns its path."""
    if not folders:
        raise SettingsError(f"specify the folders to report: {EXPECTED}.")
    check_destination(out, "file", "--out")
    # A browser shows a local file of another name as text.
    if out.suffix.lower() not in (".html", ".htm"):
        raise SettingsError(f"--out: {out} must end in .html.")
    names = [folder.resolve().name for folder in folders]
    return write_report(load_runs(folders), out, console, names)


def write_report(runs: LoadedRuns, out: Path, console: Console, names: Sequence[str] = ()) -> Path:
    """Write the page of the runs; `names` are its title unless there is just one study."""
    pictures = [_pictures(study, console) for study in runs.studies]
    if any(study.evidence for study in runs.studies):
        # It takes minutes for detectors on thousands of images.
        console.print("Computing intervals …", highlight=False)
    title = runs.studies[0].title if len(runs.studies) == 1 else shortened(names)
    text = render_page(runs, pictures, title, shlex.join(["polynl", *sys.argv[1:]]))
    write_atomically(out, text)
    size = f"{out.stat().st_size / 1e6:.2f} MB"
    console.print(
        escape(f"The report is in {out} ({size}): open it in a browser."), highlight=False, soft_wrap=True
    )
    return out


def _pictures(study: Study, console: Console) -> Pictures:
    console.print(escape(f"Drawing what the networks look at: {study.title} …"), highlight=False)
    pictures = study_pictures(study)
    for line in pictures.missing:
        console.print(escape(f"No pictures: {line}"), highlight=False, soft_wrap=True)
    return pictures
