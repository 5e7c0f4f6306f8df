"""What tables and sentences say of a study's differences, and what is drawn of its blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polynl.results.charts import block_charts
from polynl.results.study import Study, Training, variant_of
from polynl.results.tables import accuracy_table
from polynl.results.verdicts import conclusion, evidence_tables, verdicts
from polynl.tasks.outcomes import Outcomes
from polynl.train.recipe_file import load_recipe

NAMES = np.array([f"{number:04}" for number in range(200)])


def training(folder: Path, block: str, seed: int, right: int, *keys: str, **figures: Any) -> Training:
    """A training that is right on the first images."""
    words = ["--model.block", block, "--epochs", "1", *keys]
    recipe = load_recipe("scenes", words).model_dump(mode="json")
    place = folder / f"{block}{''.join(keys)}-{seed}"
    place.mkdir()
    Outcomes(NAMES, np.zeros(200, dtype=int), {"top1": np.arange(200) < right}).save(place / "outcomes.npz")
    rows = [{"epoch": 1, "seconds": 1.0, "loss": 1.0, "top1": right / 2, **figures}]
    return Training(place, recipe, seed, rows)


def study(folder: Path, seeds: int = 2, **share: float | None) -> Study:
    figures = {f"layer3.0.{name}": value for name, value in share.items()}
    variants = [
        [training(folder, "none", seed, 100) for seed in range(seeds)],
        [training(folder, "tesa", seed, 101) for seed in range(seeds)],
        [training(folder, "poly_nl", seed, 150, **figures) for seed in range(seeds)],
    ]
    return Study("a title", "classification", [variant_of(trainings) for trainings in variants], [folder])


def test_the_table_marks_what_is_beyond_chance(tmp_path: Path) -> None:
    (table,) = evidence_tables(study(tmp_path))
    headings, plain, tesa, poly = table.lines()
    assert headings == ["", "seeds", "mean", "minus no block", "minus Poly-NL"]
    assert plain[1] == "2"
    assert plain[2].startswith("50.0 (4")
    assert plain[3] == ""
    assert plain[4].startswith("−25.0 (−3")
    assert plain[4].endswith("*")
    assert tesa[3].startswith("+0.5 (+0.0 to +")
    assert not tesa[3].endswith("*")
    assert poly[3].startswith("+25.0 (+")
    assert poly[3].endswith("*")
    assert poly[4] == ""


def test_the_conclusion_is_about_the_network_without_a_block(tmp_path: Path) -> None:
    found = study(tmp_path, seeds=3)
    text = conclusion(found)
    assert text == (
        "Compared with no block, Top-1 is higher with Poly-NL (+25.0); within noise with TESA (+0.5)."
    )
    plain, tesa, poly = found.variants
    alone = conclusion(replace(found, variants=[plain, tesa]))
    assert alone.startswith("Top-1 with TESA is within noise of that without a block: +0.5 (+0.0 to")
    assert conclusion(replace(found, variants=[plain, poly])).startswith(
        "Top-1 with Poly-NL is higher than without a block: +25.0 (+"
    )
    none = conclusion(replace(found, variants=[plain, tesa, replace(tesa, label="another")]))
    assert none.startswith("No block changes Top-1 beyond noise; differences from +0.0 to +")
    assert none.endswith(" remain possible.")


def test_the_conclusion_does_not_claim_more_than_was_run(tmp_path: Path) -> None:
    found = study(tmp_path, seeds=1)
    plain, tesa, poly = found.variants
    assert conclusion(found).endswith(
        "With one seed in common, how much trainings differ is not counted as noise."
    )
    assert conclusion(replace(found, quick=True)).startswith("Made with --quick")
    assert conclusion(replace(found, variants=[tesa, poly])) == (
        "Poly-NL has the highest Top-1: to see what a block changes, train the network without and with it."
    )
    nothing = replace(plain.trainings[0], rows=[{"epoch": 1, "seconds": 1.0, "top1": 0.0}])
    assert conclusion(replace(found, variants=[replace(plain, trainings=[nothing])])).startswith(
        "Top-1 is 0 in"
    )
    unscored = replace(plain, trainings=[replace(plain.trainings[0], rows=[{"epoch": 1, "seconds": 1.0}])])
    assert conclusion(replace(found, variants=[unscored])) == "There is no Top-1 yet."


OPEN = "Poly-NL has the highest Top-1, but whether that is chance is open: "


def test_the_conclusion_says_why_a_difference_is_open(tmp_path: Path) -> None:
    found = study(tmp_path, seeds=2)
    plain, tesa, poly = found.variants
    no_common = [replace(plain, trainings=plain.trainings[:1]), replace(poly, trainings=poly.trainings[1:])]
    assert conclusion(replace(found, variants=no_common)) == (
        f"{OPEN}they have no seed in common with the network without a block."
    )
    assert conclusion(replace(found, variants=[no_common[0], tesa, no_common[1]])) == (
        "Top-1 with TESA is within noise of that without a block: +0.5 (+0.0 to +1.5). With one seed in "
        "common, how much trainings differ is not counted as noise. What Poly-NL would change is open: they "
        "have no seed in common with the network without a block."
    )
    for file in tmp_path.glob("poly_nl-*/outcomes.npz"):
        file.unlink()
    assert conclusion(replace(found, variants=[plain, poly])) == (
        f"{OPEN}there are no outcomes of images to tell from."
    )
    Outcomes(NAMES[:9], np.zeros(9, dtype=int), {"top1": np.ones(9, dtype=bool)}).save(
        tmp_path / "poly_nl-1" / "outcomes.npz"
    )
    assert conclusion(replace(found, variants=[plain, poly])) == (
        f"{OPEN}the trainings were scored on different images."
    )


def test_unfinished_trainings_are_named(tmp_path: Path) -> None:
    found = study(tmp_path)
    plain, tesa, poly = found.variants
    longer = [replace(t, recipe={**t.recipe, "epochs": 3}) for t in tesa.trainings]
    first = verdicts(replace(found, variants=[plain, replace(tesa, trainings=longer), poly]))[0]
    assert first == (
        "Not finished, but counted in the means: TESA with seed 0 (epoch 1 of 3), TESA with seed 1 (epoch 1 "
        "of 3)."
    )


def test_few_images_are_said_to_be_too_few(tmp_path: Path) -> None:
    found = study(tmp_path)
    for file in tmp_path.rglob("outcomes.npz"):
        Outcomes(NAMES[:19], np.zeros(19, dtype=int), {"top1": np.arange(19) < 9}).save(file)
    few = "Only 19 images have something to find, too few to tell a difference from chance."
    assert few in conclusion(found)
    assert few in verdicts(found)[-1]


def test_the_conclusion_names_what_else_the_trainings_differ_in(tmp_path: Path) -> None:
    found = replace(study(tmp_path), unequal=["epochs", "optimizer.lr"])
    assert conclusion(found).endswith(" The trainings also differ in epochs, optimizer.lr.")


def test_a_single_variant_has_no_differences_to_show(tmp_path: Path) -> None:
    found = study(tmp_path)
    assert evidence_tables(replace(found, variants=found.variants[:1])) == []


def test_sentences_say_it_in_words(tmp_path: Path) -> None:
    first, second, how = verdicts(study(tmp_path, seeds=3))
    assert first.startswith("Top-1 against no block, beyond chance: Poly-NL +25.0 (")
    assert "; within chance: TESA +0.5 (+0.0 to" in first
    assert second.startswith("Top-1 against Poly-NL, beyond chance: TESA −24.5 (")
    assert "no block" not in second.partition(":")[2], "that pair has been compared"
    assert "1,000 bootstrap replicates that draw the 200 images anew" in how
    assert "allow for the spread over 3 seeds. If" in how
    assert "one in twenty" in how
    assert "too narrow" not in how


def test_with_one_seed_they_say_what_is_left_out(tmp_path: Path) -> None:
    how = verdicts(study(tmp_path, seeds=1))[-1]
    assert "draw the 200 images anew" in how
    assert "With one seed they leave out how much trainings differ, so they are too narrow." in how


def test_the_full_table_has_intervals_and_the_compact_one_has_not(tmp_path: Path) -> None:
    found = study(tmp_path)
    poly = {row.label: row.cells for row in accuracy_table(found).rows}["Poly-NL"]
    assert poly[0].startswith("75.0 ± 0.0 (6")
    assert poly[1].startswith("+25.0 (+1")
    short = {row.label: row.cells for row in accuracy_table(found, compact=True).rows}["Poly-NL"]
    assert short[0] == "75.0 ± 0.0"


def test_without_outcomes_there_are_no_intervals(tmp_path: Path) -> None:
    found = study(tmp_path)
    for file in tmp_path.rglob("outcomes.npz"):
        file.unlink()
    assert evidence_tables(found) == verdicts(found) == []
    assert {row.label: row.cells for row in accuracy_table(found).rows}["Poly-NL"][1] == "+25.0"


def test_trainings_scored_on_different_images_are_not_compared(tmp_path: Path) -> None:
    found = study(tmp_path)
    file = found.variants[0].trainings[0].folder / "outcomes.npz"
    Outcomes(NAMES[:9], np.zeros(9, dtype=int), {"top1": np.ones(9, dtype=bool)}).save(file)
    assert found.evidence is None
    (line,) = verdicts(found)
    assert line.startswith(
        "There are no intervals: no block with seed 0 and no block with seed 1 were scored"
    )
    assert line.endswith("on different images: 9 images, and 200.")
    assert evidence_tables(found) == []


def test_pairs_with_one_seed_in_common_are_said_to_have_one(tmp_path: Path) -> None:
    found = study(tmp_path)
    first = found.variants[0]
    fewer = replace(found, variants=[replace(first, trainings=first.trainings[:1]), *found.variants[1:]])
    how = verdicts(fewer)[-1]
    assert "spread over the 1 to 2 seeds in common" in how
    assert "With one seed they leave out how much trainings differ" in how


def test_an_unfinished_training_leaves_its_variant_without_an_interval(tmp_path: Path) -> None:
    found = study(tmp_path)
    (found.variants[2].trainings[1].folder / "outcomes.npz").unlink()
    poly = {row.label: row.cells for row in accuracy_table(found).rows}["Poly-NL"]
    assert poly[0] == "75.0 ± 0.0"


def test_two_variants_without_a_block_leave_poly_nl_in_the_table(tmp_path: Path) -> None:
    found = study(tmp_path)
    again = replace(found.variants[0], label="again")
    more = replace(found, variants=[found.variants[0], again, *found.variants[1:]])
    (table,) = evidence_tables(more)
    assert table.lines()[0] == ["", "seeds", "mean", "minus no block", "minus Poly-NL"]


def test_a_figure_that_is_no_number_is_passed_over(tmp_path: Path) -> None:
    lines = verdicts(study(tmp_path, share=None))
    assert not any("hardly" in line for line in lines)


@pytest.mark.parametrize(("share", "idle"), [(2e-4, True), (0.2, False)])
def test_a_block_that_did_nothing_in_any_training_is_pointed_out(
    share: float, idle: bool, tmp_path: Path
) -> None:
    lines = verdicts(study(tmp_path, seeds=1, share=share))
    assert any("Poly-NL, with seed 0: The block at layer3.0 hardly" in line for line in lines) == idle


def test_blocks_that_did_nothing_in_some_trainings_are_pointed_out_with_their_seeds(tmp_path: Path) -> None:
    shares = {0: {"a": 4e-4, "b": 0.2}, 1: {"a": 0.2, "b": 0.2}, 2: {"a": 2e-4, "b": 3e-4}}
    found = [
        training(tmp_path, "poly_nl", seed, 150, **{f"{block}.share": share for block, share in of.items()})
        for seed, of in shares.items()
    ]
    lines = [line for line in verdicts(Study("t", "classification", [variant_of(found)])) if "hardly" in line]
    assert [line.split(": its branch")[0] for line in lines] == [
        "Poly-NL, with 2 of 3 seeds (0, 2): The block at a hardly does anything",
        "Poly-NL, with 1 of 3 seeds (2): The block at b hardly does anything",
    ]
    assert "at most 0.0004 of its output" in lines[0]


def test_trainings_without_outcomes_are_named(tmp_path: Path) -> None:
    found = study(tmp_path)
    assert not any("outcomes.npz" in line for line in verdicts(found))
    (tmp_path / "poly_nl-1" / "outcomes.npz").unlink()
    assert verdicts(replace(found))[0].startswith(
        "Without outcomes.npz, and so in the scores but not in the intervals: Poly-NL with seed 1. "
    )


def test_shares_and_scales_are_drawn_against_epochs(tmp_path: Path) -> None:
    figure = block_charts(study(tmp_path, share=0.2, alpha=0.9, beta=0.1))
    assert figure is not None
    assert [(chart.title, chart.log[1]) for chart in figure.charts] == [
        ("Share of the branch, ‖βY‖ ÷ ‖Z‖", True),
        ("α", False),
        ("|β|", False),
    ]
    assert [series.label for series in figure.legend] == ["Poly-NL"]
    assert figure.charts[0].curves[0].points == [(1.0, 0.2)]
    assert block_charts(study_without_blocks(tmp_path / "other")) is None


def test_betas_of_opposite_signs_do_not_cancel(tmp_path: Path) -> None:
    betas = {f"layer3.0.{name}": value for name, value in (("share", 0.2), ("beta", 0.5))}
    opposite = betas | {"layer3.0.beta": -0.3}
    trainings = [
        training(tmp_path, "poly_nl", seed, 9, **figures) for seed, figures in enumerate((betas, opposite))
    ]
    figure = block_charts(Study("a title", "classification", [variant_of(trainings)]))
    assert figure is not None
    curve = figure.charts[-1].curves[0]
    assert (curve.points, curve.ends) == ([(1.0, 0.4)], [(0.3, 0.5)])


def study_without_blocks(folder: Path) -> Study:
    folder.mkdir()
    return study(folder)


def test_options_make_a_variant_of_their_own(tmp_path: Path) -> None:
    reduced = variant_of([training(tmp_path, "poly_nl", 0, 150, "--model.options", "{reduction: 4}")])
    assert (reduced.row, reduced.label) == ("poly_nl(reduction=4)", "Poly-NL (reduction=4)")
    assert reduced.block == "poly_nl"
