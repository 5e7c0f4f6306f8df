"""`polynl compare`: two runs, or checkpoints, on the same images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from polynl import cli
from polynl.tasks.outcomes import Outcomes
from polynl.train.loop import train
from polynl.train.recipe_file import load_recipe, to_yaml
from polynl.train.run_folder import unequal_training

TESTS = Path(__file__).parent.parent
TINY = {
    "classification": TESTS / "train" / "tiny.yaml",
    "instance_segmentation": TESTS / "tiny_instances.yaml",
    "face_detection": TESTS / "tiny_faces.yaml",
}
Run = Callable[..., tuple[int, str]]


def trained(folder: Path, *keys: str, task: str = "classification") -> Path:
    train(load_recipe(TINY[task], keys), folder, Console(quiet=True))
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with a block and one without, scored on the same 40 scenes."""
    folder = tmp_path_factory.mktemp("compared")
    keys = ("--data.val_images", "40")
    return [trained(folder / block, *keys, "--model.block", block) for block in ("none", "poly_nl")]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: object) -> tuple[int, str]:
        try:
            cli.main(["compare", *map(str, words)])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        else:
            code = 0
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


def rewritten(run: Path, folder: Path, right: np.ndarray) -> Path:
    """A copy of a run that was right on other images."""
    shutil.copytree(run, folder)
    old = Outcomes.load(run / "outcomes.npz")
    Outcomes(old.images, old.truth, {"top1": right}).save(folder / "outcomes.npz")
    return folder


def test_a_run_saves_what_its_scores_were_computed_from(runs: list[Path]) -> None:
    for run in runs:
        outcomes = Outcomes.load(run / "outcomes.npz")
        top1 = json.loads((run / "metrics.json").read_text())[-1]["top1"]
        assert len(outcomes) == 40
        assert 100 * outcomes.arrays["top1"].mean() == pytest.approx(top1)


def test_a_difference_within_chance(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    half = np.arange(40) % 2 == 0
    first, second = (
        rewritten(runs[0], tmp_path / name, right)
        for name, right in (("a", half), ("b", np.roll(half, 1) | (np.arange(40) == 0)))
    )
    code, said = compare(first, second, "--out", tmp_path / "out.json")
    assert code == 0
    assert "On 40 images" in said
    assert "No difference beyond chance: Top-1 differs by +2.5 (−" in said
    assert "polynl reproduce --seeds" in said
    (score,) = json.loads((tmp_path / "out.json").read_text())["scores"]
    assert score["first"]["value"] == 50
    assert score["difference"]["value"] == 2.5
    assert score["difference"]["low"] < 0 < score["difference"]["high"]


def test_a_difference_beyond_chance_names_the_better_one(
    runs: list[Path], tmp_path: Path, compare: Run
) -> None:
    worse, better = (rewritten(runs[0], tmp_path / n, np.arange(40) < k) for n, k in (("w", 8), ("b", 30)))
    for order in ((worse, better), (better, worse)):
        code, said = compare(*order)
        assert code == 0
        assert f"{better} is better on images like these: Top-1 differs by" in said


def test_the_best_epoch_is_not_compared_with_the_last_unsaid(runs: list[Path], compare: Run) -> None:
    one, two = (run / "best.safetensors" for run in runs)
    said = f"{two} is of the epoch that scored best, which flatters it"
    assert said in compare(runs[0], two)[1]
    assert "flatters" not in compare(one, two)[1]


def test_what_else_the_trainings_differ_in_is_said(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    _, said = compare(*runs)
    assert "not trained alike" not in said, "only the block differs"
    other = shutil.copytree(runs[1], tmp_path / "other")
    recipe = load_recipe(other / "recipe.yaml", ["--optimizer.lr", "0.5", "--workers", "1", "--seed", "9"])
    (other / "recipe.yaml").write_text(to_yaml(recipe))
    _, said = compare(runs[0], other)
    assert said.endswith("so not only blocks make the difference: optimizer.lr.")


def test_with_keys_of_the_recipe_both_are_scored_now(runs: list[Path], compare: Run) -> None:
    code, said = compare(*runs, "--data.val-images", "30")
    assert code == 0
    assert f"Scoring {runs[0] / 'last.safetensors'}" in said
    assert "On 30 images" in said
    code, said = compare("--data.val-images", "30", *runs)
    assert code == 2
    assert "the runs must come first, not --data.val-images: polynl compare RUN_A RUN_B" in said


def test_checkpoints_and_older_runs_are_scored_now(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    older = shutil.copytree(runs[0], tmp_path / "older")
    (older / "outcomes.npz").unlink()
    code, said = compare(older, runs[1] / "last.safetensors")
    assert code == 0
    assert f"Scoring {older / 'last.safetensors'}" in said
    code, again = compare(*runs)
    assert (
        said.partition("images")[2].partition("95 %")[0] == again.partition("images")[2].partition("95 %")[0]
    )
    saved = Outcomes.load(runs[0] / "outcomes.npz")
    assert not (older / "outcomes.npz").exists()
    assert f"{100 * saved.arrays['top1'].mean():.1f} (" in said


@pytest.mark.parametrize("task", ["instance_segmentation", "face_detection"])
def test_detectors(task: str, tmp_path: Path, compare: Run) -> None:
    pytest.importorskip("pycocotools")
    first, second = (
        trained(tmp_path / block, "--model.block", block, task=task) for block in ("none", "poly_nl")
    )
    row = json.loads((first / "metrics.json").read_text())[-1]
    code, said = compare(first, second, "--out", tmp_path / "out.json")
    assert code == 0, said
    scores = json.loads((tmp_path / "out.json").read_text())["scores"]
    assert {one["score"]: one["first"]["value"] for one in scores} == pytest.approx(
        {one["score"]: row[one["score"]] for one in scores}, abs=1e-6
    )
    assert len(scores) >= 2


def damaged(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder)
    old = Outcomes.load(run / "outcomes.npz")
    Outcomes(old.images, old.truth, {}).save(folder / "outcomes.npz")
    return folder


def test_equal_outcomes_are_said_to_be_equal(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    code, said = compare(runs[0], shutil.copytree(runs[0], tmp_path / "copy"))
    assert code == 0
    assert "No difference: Top-1 is the same, whichever images are drawn." in said


def test_what_cannot_be_compared_is_said(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    fewer = trained(tmp_path / "fewer", "--data.val_images", "12")
    harder = trained(tmp_path / "harder", "--data.val_images", "40", "--data.difficulty", "hard")
    empty = tmp_path / "empty"
    empty.mkdir()
    several = tmp_path / "several"
    shutil.copytree(runs[0], several / "one")
    (tmp_path / "notes.md").touch()
    loose = tmp_path / "loose" / "last.pt"
    loose.parent.mkdir()
    shutil.copy(runs[0] / "last.pt", loose)
    detector = tmp_path / "detector"
    detector.mkdir()
    shutil.copy(TINY["face_detection"], detector / "recipe.yaml")
    unfinished = shutil.copytree(runs[0], tmp_path / "unfinished")
    for name in ("outcomes.npz", "last.safetensors"):
        (unfinished / name).unlink()
    for other, message in (
        (fewer, "were scored on different images: 40 images, and 12"),
        (harder, "with different labels"),
        (empty, "is not the folder of a run: it has no recipe.yaml"),
        (tmp_path / "nothing", "no such run or checkpoint"),
        (several, f"it has no recipe.yaml. Runs in it: {several / 'one'}"),
        (tmp_path / "notes.md", "is neither the folder of a run nor a checkpoint (.pt, .pth, .safetensors)"),
        (loose, f"there is no recipe.yaml next to {loose}: copy the one it was trained with there."),
        (detector, f"{runs[0]} is trained for classification, {detector} for face_detection."),
        (unfinished, "this training has not finished"),
        (runs[0], "is given twice"),
        (damaged(runs[0], tmp_path / "damaged"), "outcomes.npz is not of classification, or is damaged"),
    ):
        code, said = compare(runs[0], other)
        assert (code, message in said) == (2, True), said


def test_more_than_two_runs_are_refused_before_any_is_scored(runs: list[Path], compare: Run) -> None:
    code, said = compare(*runs, runs[0], "--data.val-images", "30")
    assert code == 2
    assert said.startswith(f"polynl: two runs can be compared, not a third, {runs[0]}: for more, use")


def test_a_run_without_weights_cannot_be_scored_anew(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    stored = shutil.copytree(runs[0], tmp_path / "stored")
    (stored / "last.safetensors").unlink()
    assert compare(stored, runs[1])[0] == 0
    code, said = compare(stored, runs[1], "--data.val-images", "30")
    assert code == 2
    assert f"{stored} has no last.safetensors to score anew with --data.val-images 30. Without keys," in said


def test_few_images_decide_nothing(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    short = [trained(tmp_path / f"{seed}", "--data.val_images", "5", "--seed", f"{seed}") for seed in (0, 1)]
    outcomes = Outcomes.load(short[0] / "outcomes.npz")
    for run, right in zip(short, (1, 4), strict=True):
        found = {"top1": np.arange(5) < right}
        Outcomes(outcomes.images, outcomes.truth, found).save(run / "outcomes.npz")
    _, said = compare(*short)
    assert "points. Only 5 images have something to find, too few to tell a difference from chance." in said
    assert "better" not in said


def test_nothing_learned_is_no_equality(runs: list[Path], tmp_path: Path, compare: Run) -> None:
    wrong = [rewritten(run, tmp_path / run.name, np.zeros(40, dtype=bool)) for run in runs]
    assert "Top-1 is 0 for both: neither has learned anything yet" in compare(*wrong)[1]


def test_other_data_is_named_even_if_both_are_scored_on_the_same(tmp_path: Path) -> None:
    for name in ("birds", "boats"):
        (tmp_path / name / "val").mkdir(parents=True)
    keys = [["--data", f"{{source: image_folder, root: {tmp_path / name}}}"] for name in ("birds", "boats")]
    one, other = (load_recipe(TINY["classification"], words) for words in keys)
    assert unequal_training(one, other) == ["data.root"]
    assert unequal_training(one, one) == []
