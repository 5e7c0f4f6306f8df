"""Rows of the paper's tables, which every recipe of theirs is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rich.console import Console

from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.report.run import run_report
from polynl.reproduce.run import write_results
from polynl.reproduce.settings import ReproduceSettings
from polynl.results.charts import accuracy_and_cost, training_curves
from polynl.results.study import (
    Costs,
    Origin,
    Study,
    Training,
    load_study,
    row_name,
    study_title,
    variant_of,
)
from polynl.results.tables import accuracy_table
from polynl.tasks.base import PaperTable
from polynl.tasks.registry import TASKS, task_class
from polynl.train.recipe_file import BUILT_IN, load_recipe


def paper_of(task: str) -> PaperTable:
    paper = task_class(task).paper
    assert paper is not None
    return paper


RECIPES = sorted(BUILT_IN.glob("*.yaml"))
COMPARED = (NO_BLOCK, *(name for name, entry in BLOCKS.items() if entry.in_paper))


def test_there_are_recipes() -> None:
    tasks = {yaml.safe_load(file.read_text()).get("task", load_recipe(file).task) for file in RECIPES}
    assert tasks == set(TASKS)


@pytest.mark.parametrize("block", COMPARED)
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_has_a_row(file: Path, block: str) -> None:
    recipe = load_recipe(file, ["--model.block", block])
    row, paper = row_name(recipe.model.block or "none", recipe.model.placement), task_class(recipe.task).paper
    assert paper is None or row in paper.rows
    assert row.partition("@")[0] in {"none", *BLOCKS}


@pytest.mark.parametrize("task", [name for name in TASKS if task_class(name).paper is not None])
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


# A task without figures in the paper


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """The study of a task that a test has registered, in the form that `polynl reproduce` builds."""
    monkeypatch.setitem(TASKS, "toy", "toy_task:Toy")
    recipe = load_recipe(BUILT_IN.parent.parent.parent / "tests" / "train" / "tiny.yaml", ["--task", "toy"])
    trainings = {
        block: [
            Training(
                tmp_path / f"{block}-seed{seed}",
                recipe.model_dump(mode="json")
                | {"seed": seed, "model": recipe.model.model_dump(mode="json") | {"block": block}},
                seed,
                [{"epoch": 1, "seconds": 3.0, "loss": 1.0, "top1": score + seed}],
            )
            for seed in (0, 1)
        ]
        for block, score in (("none", 50.0), ("poly_nl", 60.0))
    }
    variants = [variant_of(seeds, Costs(1000, 2_000_000, 1.0, 2.0)) for seeds in trainings.values()]
    return Study(study_title([variants[0].recipe]), "toy", variants, [tmp_path])


def test_a_study_is_loaded_as_it_was_saved(toy: Study, tmp_path: Path) -> None:
    origin = Origin("polynl reproduce", "polynl reproduce", {"cpu": "a processor"})
    toy.save(tmp_path / "results.json", origin)
    assert load_study(tmp_path / "results.json") == (toy, origin)


def test_a_task_without_a_paper_has_tables_and_charts(toy: Study) -> None:
    assert toy.title == "Toy, small ResNet, on easy scenes, 2 epochs"
    table = accuracy_table(toy)
    assert [group.heading for group in table.columns] == ["here", "cost"]
    assert table.title.endswith("gain: in Hits")
    assert [row.label for row in table.rows] == ["no block", "Poly-NL"]
    assert list(table.rows[1].cells[:2]) == ["60.5 ± 0.7", "+10.0"]
    assert accuracy_table(toy, compact=True).lines()[0] == [
        *("", "Hits", "params", "MACs", "forward", "step")
    ]
    assert [chart.title for chart in training_curves(toy).charts] == ["Hits", "Training loss"]
    figure = accuracy_and_cost(toy)
    assert figure is not None
    assert figure.charts[0].title == "Hits against the forward pass"


def test_a_task_without_a_paper_has_a_report(toy: Study, tmp_path: Path) -> None:
    origin = Origin("polynl reproduce", "polynl reproduce", {"cpu": "a processor"})
    toy.save(tmp_path / "results.json", origin)
    text = run_report([tmp_path], tmp_path / "report.html", Console(quiet=True)).read_text()
    assert "<h1>Toy, small ResNet, on easy scenes, 2 epochs</h1>" in text
    assert "60.5 ± 0.7" in text
    assert "paper&#39;s scores" not in text
    assert "The paper's scores" not in text


def test_reproduce_writes_the_results_of_a_task_without_a_paper(toy: Study, tmp_path: Path) -> None:
    machine = dict.fromkeys(("cpu", "torch", "polynl", "commit"), "x") | {"cores": 2, "threads": 1}
    origin = Origin("polynl reproduce", "polynl reproduce", machine)
    write_results(ReproduceSettings(out=tmp_path), toy, origin, Console(quiet=True))
    page = (tmp_path / "results.md").read_text()
    assert "| Poly-NL | 60.5 ± 0.7 | 1.00 k |" in page
    assert "Paper" not in page
    assert (tmp_path / "accuracy_and_cost.png").read_bytes().startswith(b"\x89PNG")
