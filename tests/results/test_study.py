"""Rows of the paper's tables, which every recipe of theirs is compared with."""

from __future__ import annotations

import pytest
import yaml

from polynl.blocks.registry import BLOCKS
from polynl.results.study import row_name
from polynl.tasks.base import PaperTable
from polynl.tasks.registry import TASKS, task_class
from polynl.train.recipe_file import BUILT_IN, load_recipe


def paper_of(task: str) -> PaperTable:
    paper = task_class(task).paper
    assert paper is not None
    return paper


RECIPES = sorted(BUILT_IN.rglob("[!_.]*.yaml"))


def test_there_are_recipes() -> None:
    tasks = {yaml.safe_load(file.read_text()).get("task", load_recipe(file).task) for file in RECIPES}
    assert tasks == set(TASKS)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_recipe_has_a_row(file: object) -> None:
    recipe = load_recipe(file)  # type: ignore[arg-type]
    row = row_name(recipe.model.block or "none", recipe.model.placement)
    assert row in paper_of(recipe.task).rows
    assert row.partition("@")[0] in {"none", *BLOCKS}


@pytest.mark.parametrize("task", TASKS)
def test_tables_are_whole(task: str) -> None:
    table, best = paper_of(task), task_class(task).best_by
    assert best in table.scores
    assert set(table.scores) <= set(task_class(task).scores)
    assert next(iter(table.rows)) == "none"
    assert all(len(figures) == len(table.scores) for figures in table.rows.values())
    assert all(30 < figure < 100 for figures in table.rows.values() for figure in figures)
    assert table.figures("none")[best] == table.rows["none"][table.scores.index(best)]
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
        assert [paper_of(task).figures(block)[task_class(task).best_by] for block in blocks] == figures


def test_several_placements_are_named_together() -> None:
    assert row_name("poly_nl", ["res3", "res5"]) == "poly_nl@res3+res5"
