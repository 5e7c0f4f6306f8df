"""The tables of docs/results.md are those that its evidence gives."""

import runpy
from pathlib import Path

import pytest

from polynl.results.tables import as_markdown

DOCS = Path(__file__).parent.parent / "docs"
EVIDENCE = runpy.run_path(str(DOCS / "evidence" / "tables.py"))


@pytest.mark.parametrize("name", [EVIDENCE["SUMMARY"], *EVIDENCE["STUDIES"]])
def test_tables_are_on_the_page(name: str) -> None:
    page = (DOCS / "results.md").read_text()
    tables = [as_markdown(table) for table in EVIDENCE["tables"](name)]
    assert tables
    absent = [table for table in tables if table not in page]
    assert not absent, f"out of date: see python docs/evidence/tables.py {name}"


def test_every_study_has_its_tables() -> None:
    folders = {folder.name for folder in (DOCS / "evidence").iterdir() if folder.is_dir()}
    assert folders - {"__pycache__"} == set(EVIDENCE["STUDIES"])


def test_scores_by_pair_of_colours() -> None:
    """Guessing for one pair of six, and right for the others: 11 in 12."""
    by_pair = runpy.run_path(str(DOCS / "evidence" / "colour_pairs.py"))["scores"]
    found = by_pair(DOCS / "evidence" / "scenes-medium" / "poly_nl-seed1")
    assert found.pop("red and yellow") == "51.2"
    assert list(found.values()) == ["100.0"] * 5
