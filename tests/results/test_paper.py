"""The paper's figures, which every recipe of its tables is compared with."""

from __future__ import annotations

import pytest
import yaml

from polynl.results.paper import LABELS, PAPER, row_name
from polynl.train.recipe_file import BUILT_IN, load_recipe

RECIPES = sorted(BUILT_IN.glob("*.yaml"))


def test_there_are_recipes() -> None:
    tasks = {yaml.safe_load(file.read_text()).get("task", load_recipe(file).task) for file in RECIPES}
    assert tasks == set(PAPER)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_has_a_row(file: object) -> None:
    recipe = load_recipe(file)  # type: ignore[arg-type]
    row = row_name(recipe.model.block or "none", recipe.model.placement)
    assert row in PAPER[recipe.task].rows
    assert row.partition("@")[0] in LABELS


@pytest.mark.parametrize("task", PAPER)
def test_tables_are_whole(task: str) -> None:
    table = PAPER[task]
    assert table.deciding in table.headings
    assert next(iter(table.rows)) == "none"
    assert all(len(figures) == len(table.headings) for figures in table.rows.values())
    assert all(30 < figure < 100 for figures in table.rows.values() for figure in figures)
    assert (
        table.figures("none")[table.deciding]
        == table.rows["none"][list(table.headings).index(table.deciding)]
    )
    assert table.figures("chess") == {}


def test_the_figures_that_decide() -> None:
    """As printed in the paper's three tables."""
    printed = {
        "classification": [75.62, 76.09, 76.49, 75.28, 75.86, 76.30],
        "instance_segmentation": [34.6, 35.4, 35.4, 35.3, 35.4, 35.4],
        "face_detection": [89.87, 91.94, 92.58, 92.49, 92.55, 92.76],
    }
    blocks = ("none", "non_local", "tesa", "latent_gnn", "efficient_nl", "poly_nl")
    for task, figures in printed.items():
        assert [PAPER[task].figures(block)[PAPER[task].deciding] for block in blocks] == figures


def test_several_placements_are_named_together() -> None:
    assert row_name("poly_nl", ["res3", "res5"]) == "poly_nl@res3+res5"
