"""The tables of a report: scores beside the paper's, gains, spread, ratios and machines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from finished_runs import layers, networks, outcome, reproduced, row, written
from rich.console import Console

from polynl.report.load import load_runs
from polynl.results.benchmark import Point
from polynl.results.study import Origin, Study
from polynl.results.tables import (
    Table,
    absolute_table,
    accuracy_table,
    as_markdown,
    as_rich,
    environment_table,
    network_table,
    ratio_table,
)
from polynl.tasks.base import PaperTable
from polynl.tasks.registry import task_class
from polynl.train.recipe_file import load_recipe


def cells(table: Table) -> dict[str, list[str]]:
    assert all(len(line.cells) == sum(len(group.headings) for group in table.columns) for line in table.rows)
    return {line.label: list(line.cells) for line in table.rows}


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Two seeds of each; Poly-NL is better in the first epoch, and by 4 in the last."""
    outcomes = [
        outcome("none", *([row(1, top1=0.0, top5=0.0), row(2, top1=v, top5=90.0)] for v in (50.0, 52.0))),
        outcome(
            "poly_nl",
            *([row(1, top1=9.0, top5=9.0), row(2, top1=v, top5=91.0)] for v in (54.0, 56.0)),
            parameters=1500,
            multiply_adds=2_500_000,
            forward_seconds=1.5,
            training_seconds=2.2,
        ),
    ]
    (found,) = load_runs([reproduced(tmp_path / "results", outcomes)]).studies
    return found


@pytest.fixture
def on_papers_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every training were on the data of the paper."""
    monkeypatch.setattr(PaperTable, "covers", lambda *_: True)


@pytest.mark.usefixtures("on_papers_data")
def test_scores_stand_beside_the_papers(study: Study) -> None:
    table = accuracy_table(study)
    assert [(group.heading, list(group.headings)) for group in table.columns] == [
        ("here", ["Top-1", "Top-5", "gain"]),
        ("the paper: ResNet-50 on ImageNet", ["Top-1", "Top-5", "gain"]),
        ("cost", ["parameters", "multiply-adds", "forward", "training step"]),
    ]
    here = cells(table)
    assert here["no block"] == [
        *("51.0 ± 1.4", "90.0 ± 0.0", ""),
        *("75.62", "92.68", ""),
        *("1.00 k", "2.00 M", "1.00×", "1.00×"),
    ]
    assert here["Poly-NL"] == [
        *("55.0 ± 1.4", "91.0 ± 0.0", "+4.0"),
        *("76.30", "93.06", "+0.7"),
        *("1.50 k", "2.50 M", "1.50×", "1.10×"),
    ]


def test_other_data_has_nothing_of_the_paper(study: Study) -> None:
    for compact in (True, False):
        table = accuracy_table(study, compact=compact)
        assert [group.heading for group in table.columns] == ["here", "cost"]
        assert [line.label for line in table.rows] == ["no block", "Poly-NL"]


@pytest.mark.parametrize(("recipe", "images"), [("imagenet", 50_000), ("coco", 5_000), ("wider_face", 3_226)])
def test_the_paper_is_beside_its_own_networks_and_images(recipe: str, images: int) -> None:
    content = load_recipe(recipe).model_dump(mode="json")
    paper = task_class(content["task"]).paper
    assert paper is not None
    assert paper.covers(content, images)
    assert not paper.covers(content, images - 1)
    assert not paper.covers(content, None), "it is not known what was scored"
    assert not paper.covers({**content, "model": {**content["model"], "arch": "resnet18"}}, images)
    assert not paper.covers({**content, "data": {**content["data"], "source": "scenes"}}, images)


@pytest.mark.usefixtures("on_papers_data")
def test_a_compact_table_has_the_papers_scores_in_one_column(study: Study) -> None:
    headings, *rows = accuracy_table(study, compact=True).lines()
    assert headings == ["", "Top-1", "Top-5", "params", "MACs", "forward", "step", "paper"]
    assert rows == [
        ["no block", "51.0 ± 1.4", "90.0 ± 0.0", "1.00 k", "2.00 M", "1.00×", "1.00×", "75.62 / 92.68"],
        ["Poly-NL", "55.0 ± 1.4", "91.0 ± 0.0", "1.50 k", "2.50 M", "1.50×", "1.10×", "76.30 / 93.06"],
    ]


@pytest.mark.usefixtures("on_papers_data")
def test_what_was_not_run_is_faint_and_has_the_papers_figures(study: Study) -> None:
    table = accuracy_table(study)
    assert {line.label for line in table.rows if line.faint} == {
        "Non-local",
        "TESA",
        "Latent-GNN",
        "Efficient-NL",
    }
    assert cells(table)["Latent-GNN"] == ["–", "–", "–", "75.28", "92.33", "−0.3", "–", "–", "–", "–"]


@pytest.mark.usefixtures("on_papers_data")
def test_a_row_that_the_paper_has_not(tmp_path: Path) -> None:
    run = written(tmp_path / "a", [row(1, top1=1.0)], "--model.block", "polynomial")
    (study,) = load_runs([run]).studies
    here = cells(accuracy_table(study))
    # The tasks of tiny runs have no Top-5 here, and there is nothing to gain on.
    assert here["Polynomial"] == ["1.0", "–", "–", "–", "–", "30.0 s"]
    assert here["no block"][-4:] == ["75.62", "92.68", "", "–"]


@pytest.mark.usefixtures("on_papers_data")
def test_a_placement_has_its_own_row(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / place, [row(1, mask_ap=score)], *keys, task="instance_segmentation")
        for place, score, keys in (
            ("res5", 3.0, ("--model.placement", "res5")),
            ("plain", 1.0, ("--model.block", "none")),
        )
    ]
    (study,) = load_runs(runs).studies
    table = accuracy_table(study)
    assert table.title.endswith("gain: in mask AP")
    assert [line.label for line in table.rows[:2]] == ["no block", "Poly-NL at res5"]
    assert cells(table)["Poly-NL at res5"][:9] == [
        *("3.0", "+2.0"),
        *("38.7", "60.6", "41.9", "35.2", "57.2", "37.3", "+0.6"),
    ]


def test_what_is_no_number_is_not_measured(tmp_path: Path) -> None:
    nan = float("nan")
    run = written(tmp_path / "a", [row(1, top1=nan, top5=70.0) | {"loss": nan}, row(2, top1=nan)])
    (study,) = load_runs([run]).studies
    assert cells(accuracy_table(study))["Poly-NL"][0] == "70.0"
    assert list(study.scores()) == ["top5"]


def test_ratios_are_those_of_the_results() -> None:
    results = layers()
    table = ratio_table(results, "positions")
    headings = ["4", "16", "64"]
    assert [(group.heading, list(group.headings)) for group in table.columns] == [
        ("time, forward", headings),
        ("time, forward + backward", headings),
        ("peak memory, forward", headings),
        ("peak memory, forward + backward", headings),
    ]
    assert table.corner == "positions N"
    assert table.title == "Against positions, 16 channels: divided by the 1×1 convolution"
    here = cells(table)
    assert here["1×1 convolution"] == ["1.00"] * 12
    assert here["Poly-NL"] == ["2.00"] * 6 + ["3.00"] * 6
    assert here["TESA"] == ["250"] * 6 + ["4.00"] * 6
    over_channels = ratio_table(results, "channels")
    assert over_channels.corner == "channels C"
    assert [list(group.headings) for group in over_channels.columns] == [["8", "16"]] * 2
    assert cells(over_channels)["Poly-NL"] == ["2.00"] * 4


def test_medians_and_peaks() -> None:
    here = cells(absolute_table(layers(), "positions"))
    assert here["Poly-NL"] == [
        *["8.00 ms", "32.0 ms", "128 ms"] * 2,
        *["12.0 KiB", "48.0 KiB", "192.0 KiB"] * 2,
    ]


def test_skipped_points_are_not_measured() -> None:
    assert cells(ratio_table(layers(skipped="too slow"), "positions"))["TESA"] == [
        *["250", "250", "–"] * 2,
        *["4.00", "4.00", "–"] * 2,
    ]


def test_an_interrupted_benchmark_has_the_columns_that_it_came_to() -> None:
    table = ratio_table(layers(until=3), "positions")
    assert [(group.heading, list(group.headings)) for group in table.columns] == [
        ("time, forward", ["4", "16"]),
        ("peak memory, forward", ["4", "16"]),
    ]
    results = layers(until=3)
    results.measurements = [
        m for m in results.measurements if (m.method, m.point) != ("poly_nl", Point("forward", 1, 2, 16))
    ]
    assert cells(ratio_table(results, "positions"))["Poly-NL"] == ["–", "2.00", "–", "3.00"]
    assert not ratio_table(layers(until=0), "positions").columns


def test_whole_networks() -> None:
    table = network_table(networks())
    assert cells(table)["Poly-NL at res4"][:3] == ["1.50 M (1.50)", "2.00 G (2.00)", "30.0 ms (3.00)"]
    assert as_markdown(table).startswith("| network | parameters | multiply-adds |")


def test_a_column_for_each_machine() -> None:
    common = {"cpu": "a processor", "cpu_capability": "AVX2", "variables": {"OMP_NUM_THREADS": "1"}}
    origins = [
        Origin("one", "a", {**common, "seed": 0, "threads": 1}),
        Origin("two", "b", {**common, "seed": 1, "threads": 2}),
        Origin("three", "c", {**common, "cpu": "another", "gpu": "a GPU"}),
    ]
    table = environment_table(origins)
    assert [list(group.headings) for group in table.columns] == [["one, two", "three"]]
    assert table.text
    assert cells(table) == {
        "cpu": ["a processor", "another"],
        "cpu capability": ["AVX2", "AVX2"],
        "OMP_NUM_THREADS": ["1", "1"],
        "gpu": ["–", "a GPU"],
    }


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_narrow_terminal_shows_every_digit(width: int) -> None:
    headings = ["network", "parameters", "multiply-adds", "latency, 1 image", "images/s", "memory, 2 images"]
    shown = [
        "Poly-NL at layer3.1",
        "11.9 M (1.02)",
        "152 M (1.03)",
        "159 ms (1.04)",
        "12.1 (0.86)",
        "9.1 MiB (1.07)",
    ]
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(as_rich(Table.flat("", headings, [shown]), console.width))
    said = console.export_text()
    for number in " ".join(shown[1:]).split():
        assert number in said
    assert ("11.9 M (1.02)" in said) == (width == 120), "it stays on one line where there is room"


def test_labels_keep_their_words_next_to_many_short_cells() -> None:
    row = ["Convolution (residual=True)", "2", "52.2 (23.5 to 79.9)", *["+3.9 (−17.0 to +24.6)"] * 2]
    console = Console(width=80, file=io.StringIO(), record=True)
    headings = ["", "seeds", "mean", "minus no block", "minus Poly-NL"]
    console.print(as_rich(Table.flat("", headings, [row]), console.width))
    assert {"Convolution", "(residual=True)"} <= set(console.export_text().split())


def test_a_narrow_terminal_shows_the_labels_and_all_figures_of_a_wide_table() -> None:
    results = networks()
    results.methods["poly_nl@res4"]["label"] = "Poly-NL, with a long name at res4"
    for width in (80, 100):
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        console.print(as_rich(network_table(results), width))
        assert isinstance(console.file, io.StringIO)
        words = console.file.getvalue().split()
        for word in ("ResNet-18", "Poly-NL,", "res4", "1.00", "1.50", "M", "ms", "(3.00)"):
            assert any(word in shown for shown in words), (width, word)
