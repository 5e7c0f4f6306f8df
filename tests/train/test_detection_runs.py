"""Detectors in the training loop: killed and resumed, in several processes, scored from files."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from real_runs import Runner, figures, outcome
from rich.console import Console
from safetensors.torch import load_file, save_file

from polynl.data.config import SceneFiles
from polynl.data.scenes_export import export_scenes
from polynl.errors import SettingsError
from polynl.train.config import Recipe
from polynl.train.evaluation import evaluate_checkpoint, evaluate_detections
from polynl.train.recipe_file import load_recipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked and killed")
TINY = Path(__file__).parent.parent / "tiny_instances.yaml"
SILENT = Console(quiet=True)
KEYS = ["--epochs", "8", "--evaluate-every", "8", "--checkpoint-every", "3", "--val-batch", "1"]
SCORES = [f"{kind}_{name}" for kind in ("box", "mask") for name in ("ap", "ap50", "ap75", "ap_small")]


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    export_scenes(SceneFiles(images=8, val_images=5, size=64, difficulty="easy"), folder, SILENT)
    return folder


@pytest.fixture(scope="module")
def words(coco: Path) -> list[str]:
    names = ["--data.train", "train", "--data.val", "val"]
    for split in ("train", "val"):
        names += [f"--data.{split}-annotations", f"annotations/instances_{split}.json"]
    return ["--data.source", "coco", "--data.root", str(coco), *names]


@pytest.fixture(scope="module")
def learned(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned something, in one process: eight epochs of four steps."""
    folder = tmp_path_factory.mktemp("learned")
    done = Runner(folder).polynl("train", TINY, "--out", folder / "run", *words, *KEYS)
    assert done.wait() == 0, done.said
    return folder / "run"


@pytest.fixture
def recipe(learned: Path) -> Recipe:
    return load_recipe(learned / "recipe.yaml")


def detections(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    return sorted(found, key=lambda one: (one["image_id"], -one["score"], one["bbox"]))


def test_it_has_learned_something(learned: Path) -> None:
    (last,) = figures(learned)[-1:]
    assert all(last[name] for name in SCORES)
    assert float(last["mask_ap50"]) > 5
    assert json.loads((learned / "labels.json").read_text())["7"] == "cue"


def test_a_killed_run_goes_on_to_the_same_bits(
    learned: Path, words: list[str], runner: Runner, tmp_path: Path
) -> None:
    keys = [*KEYS, "--out", tmp_path / "run"]
    killed = runner.polynl("train", TINY, *words, *keys, dies_at=31)
    assert killed.wait() == -9, killed.said
    resumed = runner.polynl("train", TINY, *words, *keys, "--resume")
    assert resumed.wait() == 0, resumed.said
    assert outcome(tmp_path / "run") == outcome(learned)


def test_processes_find_together_what_one_finds(
    learned: Path, recipe: Recipe, runner: Runner, tmp_path: Path
) -> None:
    """Five images among three processes: shares of two, two and one."""
    checkpoint = learned / "last.pt"
    one = evaluate_checkpoint(recipe, checkpoint, None, SILENT, save_detections=tmp_path / "one.json")
    options = ["--checkpoint", checkpoint, "--save-detections", tmp_path / "three.json"]
    three = runner.torchrun(
        "evaluate", learned / "recipe.yaml", *options, "--out", tmp_path / "scores.json", processes=3
    )
    assert three.wait() == 0, three.said
    found = json.loads((tmp_path / "scores.json").read_text())
    assert {name: found[name] for name in one} == pytest.approx(one, abs=1e-9)
    assert one["mask_ap"] > 0
    first, second = detections(tmp_path / "one.json"), detections(tmp_path / "three.json")
    assert [entry["segmentation"] for entry in first] == [entry["segmentation"] for entry in second]
    assert {entry["image_id"] for entry in first} == {0, 1, 2, 3, 4}
    assert three.said.count("mask_ap ") == 1


def test_two_processes_train(words: list[str], runner: Runner, tmp_path: Path) -> None:
    done = runner.torchrun("train", TINY, "--out", tmp_path / "run", *words)
    assert done.wait() == 0, done.said
    rows = figures(tmp_path / "run")
    assert [row["images"] for row in rows] == ["8", "8"]
    assert all(float(row["loss"]) > 0 for row in rows)
    again = load_recipe(tmp_path / "run" / "recipe.yaml")
    scores = evaluate_checkpoint(again, tmp_path / "run" / "last.pt", None, SILENT)
    # Scored by two processes in the run, and by one here.
    assert {name: float(rows[-1][name]) for name in scores} == pytest.approx(scores, abs=1e-9)


# Files of detections


def pycocotools_scores(truth: Path, found: Path) -> dict[str, float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    scores = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for kind, iou in (("box", "bbox"), ("mask", "segm")):
            entries = json.loads(found.read_text())
            if kind == "mask":
                entries = [{key: one[key] for key in one if key != "bbox"} for one in entries]
            content = COCO(truth)
            for number, entry in enumerate(content.dataset["annotations"], 1):
                entry["id"] = number
            content.createIndex()
            evaluation = COCOeval(content, content.loadRes(entries), iou)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            for place, name in enumerate(("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")):
                if evaluation.stats[place] >= 0:
                    scores[f"{kind}_{name}"] = 100 * evaluation.stats[place]
    return scores


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_results_file_scores_as_the_checkpoint_and_as_in_pycocotools(
    learned: Path, recipe: Recipe, coco: Path, tmp_path: Path, capsys: Any
) -> None:
    options = ["--checkpoint", learned / "last.safetensors", "--save-detections", tmp_path / "found.json"]
    code, shown, _ = run(capsys, "evaluate", learned / "recipe.yaml", *options)
    assert code == 0
    scores = evaluate_detections(recipe, tmp_path / "found.json", tmp_path / "scores.json", SILENT)
    assert all(f"{name} {score:.3f}" in shown for name, score in scores.items())
    assert len(shown.splitlines()) == len(scores) == len(SCORES)
    expected = pycocotools_scores(coco / "annotations/instances_val.json", tmp_path / "found.json")
    assert scores == pytest.approx(expected, abs=1e-6)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written == {"detections": str(tmp_path / "found.json"), **scores, "skipped": 0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda entry: entry.update(image_id=77), "entry 1 of "),
        (lambda entry: entry.update(score="high"), "'high'"),
        (lambda entry: entry.update(category_id=0), "category_id"),
    ],
)
def test_a_results_file_with_a_mistake(
    change: Callable[[dict[str, Any]], Any], expected: str, recipe: Recipe, coco: Path, tmp_path: Path
) -> None:
    entry: dict[str, Any] = {"image_id": 0, "category_id": 1, "score": 0.5, "bbox": [1, 2, 3, 4]}
    change(entry)
    (tmp_path / "found.json").write_text(json.dumps([entry]))
    with pytest.raises(SettingsError) as caught:
        evaluate_detections(recipe, tmp_path / "found.json", None, SILENT)
    assert str(tmp_path / "found.json") in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "specify what to score: --checkpoint FILE or --detections PATH, or a run instead of a recipe."),
        ("--checkpoint a.pt --detections b.json", "specify what to score"),
        ("--detections nowhere.json", "--detections: no such file: nowhere.json."),
        (
            "--detections a.json --save-detections b.json",
            "--save-detections cannot be combined",
        ),
        ("--checkpoint nowhere.pt", "--checkpoint: no such file: nowhere.pt."),
        (
            "--checkpoint a.pt --save-detections .",
            "--save-detections: . is a folder; expected a file.",
        ),
    ],
)
def test_options_of_evaluate(line: str, expected: str, learned: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "evaluate", learned / "recipe.yaml", *line.split())
    assert (code, out) == (2, "")
    assert expected in err


@pytest.mark.parametrize("option", ["--detections", "--save-detections"])
def test_classification_has_no_detections(option: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x").write_text("[]")
    checkpoint = ["--checkpoint", tmp_path / "x"] if option == "--save-detections" else []
    words = [option, tmp_path / "x", *checkpoint]
    code, _, err = run(capsys, "evaluate", Path(__file__).with_name("tiny.yaml"), *words)
    assert code == 2
    assert f"{option}: classification is not a detection task" in err


def test_a_checkpoint_without_the_block_is_not_scored_as_one_with_it(
    learned: Path, tmp_path: Path, capsys: Any
) -> None:
    state = load_file(learned / "last.safetensors")
    save_file(
        {key: value for key, value in state.items() if "polynl" not in key}, tmp_path / "plain.safetensors"
    )
    words = ["evaluate", learned / "recipe.yaml", "--checkpoint", tmp_path / "plain.safetensors"]
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "missing: backbone.body.layer3.0.polynl_before.alpha" in err
    code, shown, _ = run(capsys, *words, "--model.block", "none")
    assert code == 0
    assert "mask_ap " in shown


def test_nothing_to_find_on_what_could_be_read(
    learned: Path, coco: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(coco, tmp_path / "coco")
    file = tmp_path / "coco" / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    content["annotations"] = [entry for entry in content["annotations"] if entry["image_id"] == 0]
    file.write_text(json.dumps(content))
    (tmp_path / "coco" / "val" / content["images"][0]["file_name"]).write_bytes(b"")
    words = ["--data.root", tmp_path / "coco", "--data.on-bad-image", "skip"]
    code, _, err = run(
        capsys, "evaluate", learned / "recipe.yaml", "--checkpoint", learned / "last.pt", *words
    )
    assert code == 1
    assert "the validation images that can be read contain no objects." in err


def test_a_checkpoint_is_scored_without_training_images(learned: Path, coco: Path, tmp_path: Path) -> None:
    shutil.copytree(coco, tmp_path / "coco")
    shutil.rmtree(tmp_path / "coco" / "train")
    recipe = load_recipe(learned / "recipe.yaml", ["--data.root", str(tmp_path / "coco")])
    assert evaluate_checkpoint(recipe, learned / "last.pt", None, SILENT)["mask_ap"] > 0


def test_weights_to_start_from_need_not_be_there_to_evaluate(
    learned: Path, words: list[str], tmp_path: Path
) -> None:
    started = load_recipe(learned / "recipe.yaml", ["--model.weights", str(tmp_path / "gone.pth")])
    assert evaluate_checkpoint(started, learned / "last.pt", None, SILENT)["mask_ap"] > 0
