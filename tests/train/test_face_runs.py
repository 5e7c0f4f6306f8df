"""Face detectors in the training loop: killed and resumed, in several processes, scored and drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from PIL import Image
from real_runs import Runner, figures, outcome
from rich.console import Console
from torchvision.transforms.v2.functional import to_pil_image

from polynl.errors import SettingsError
from polynl.files import check_destination
from polynl.train.evaluation import evaluate_checkpoint, evaluate_detections
from polynl.train.recipe_file import load_recipe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked and killed")
TINY = Path(__file__).parent.parent / "tiny_faces.yaml"
SILENT = Console(quiet=True)
# Sure of little after eight steps, so that whatever it finds is kept; scored one by one, since a batch of two
# is not computed to the same bits.
KEYS = ["--checkpoint-every", "1", "--val-batch", "1", "--model.detector-options.score_thresh", "0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faces")
    done = Runner(folder).polynl("train", TINY, "--out", folder / "run", *KEYS)
    assert done.wait() == 0, done.said
    return folder / "run"


def test_figures(finished: Path) -> None:
    rows = figures(finished)
    assert [row["images"] for row in rows] == ["8", "8"]
    assert all(float(row["loss"]) > 0 for row in rows)
    assert {"classification", "bbox_regression", "hard_ap"} < rows[0].keys()
    assert json.loads((finished / "labels.json").read_text()) == {"1": "face"}


def test_a_killed_run_goes_on_to_the_same_bits(finished: Path, runner: Runner, tmp_path: Path) -> None:
    keys = [*KEYS, "--out", tmp_path / "run"]
    killed = runner.polynl("train", TINY, *keys, dies_at=17)
    assert killed.wait() == -9, killed.said
    resumed = runner.polynl("train", TINY, *keys, "--resume")
    assert resumed.wait() == 0, resumed.said
    assert outcome(tmp_path / "run") == outcome(finished)


def test_processes_find_together_what_one_finds(finished: Path, runner: Runner, tmp_path: Path) -> None:
    """Five images among three processes; the text files of each are in one folder."""
    recipe = load_recipe(finished / "recipe.yaml")
    one = evaluate_checkpoint(recipe, finished / "last.pt", None, SILENT, save_detections=tmp_path / "one")
    options = ["--checkpoint", finished / "last.pt", "--save-detections", tmp_path / "three"]
    three = runner.torchrun(
        "evaluate", finished / "recipe.yaml", *options, "--out", tmp_path / "scores.json", processes=3
    )
    assert three.wait() == 0, three.said
    found = json.loads((tmp_path / "scores.json").read_text())
    assert {name: found[name] for name in one} == pytest.approx(one, abs=1e-9)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.txt"))
    assert len(files) == 5
    for file in files:
        first, second = ((tmp_path / name / file).read_text().split() for name in ("one", "three"))
        assert first[:2] == second[:2]
        assert [float(word) for word in first[2:]] == pytest.approx([float(word) for word in second[2:]])
    assert any(len((tmp_path / "one" / file).read_text().splitlines()) > 2 for file in files)
    assert evaluate_detections(recipe, tmp_path / "one", None, SILENT) == pytest.approx(one)


def test_two_processes_train(runner: Runner, tmp_path: Path) -> None:
    done = runner.torchrun("train", TINY, "--out", tmp_path / "run", *KEYS)
    assert done.wait() == 0, done.said
    rows = figures(tmp_path / "run")
    scores = evaluate_checkpoint(
        load_recipe(tmp_path / "run" / "recipe.yaml"), tmp_path / "run" / "last.pt", None, SILENT
    )
    assert {name: float(rows[-1][name]) for name in scores} == pytest.approx(scores, abs=1e-9)


def test_faces_are_drawn(finished: Path, tmp_path: Path, capsys: Any) -> None:
    image, _ = load_recipe(finished / "recipe.yaml").build_task().val_set()[0]
    to_pil_image(image).save(tmp_path / "crowd.png")
    words = [tmp_path / "crowd.png", "--checkpoint", finished / "best.pt", "--threshold", "0"]
    code, shown, err = run(capsys, "predict", *words, "--out", tmp_path / "out")
    assert code == 0, err
    assert " × face" in shown
    content = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert content["categories"] == [{"id": 1, "name": "face"}]
    assert "segmentation" not in content["annotations"][0]
    with Image.open(tmp_path / "out" / "crowd.png") as picture:
        assert picture.size == (480, 480)


def test_faces_are_faces_also_without_the_names_of_the_run(
    finished: Path, tmp_path: Path, capsys: Any
) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes((finished / "best.safetensors").read_bytes())
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    words = [tmp_path / "a.png", "--checkpoint", weights, "--recipe", finished / "recipe.yaml"]
    assert run(capsys, "predict", *words, "--out", tmp_path / "out")[0] == 0
    content = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert content["categories"] == [{"id": 1, "name": "face"}]


def test_a_file_is_no_folder_of_detections(finished: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    recipe = finished / "recipe.yaml"
    code, _, err = run(capsys, "evaluate", recipe, "--detections", tmp_path / "file")
    assert code == 2
    assert f"--detections: no such folder: {tmp_path / 'file'}." in err
    words = ["--checkpoint", finished / "last.pt", "--save-detections", tmp_path / "file"]
    code, _, err = run(capsys, "evaluate", recipe, *words)
    assert code == 2
    assert "is a file; expected a folder." in err


def test_faces_of_another_model_are_not_mixed_with_these(tmp_path: Path, capsys: Any) -> None:
    """Refused before so much as the checkpoint is looked for."""
    folder = tmp_path / "found"
    (folder / "0--Parade").mkdir(parents=True)
    words = ["evaluate", TINY, "--checkpoint", tmp_path / "gone.pt", "--save-detections", folder]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    message = f"--save-detections: {folder} already contains 0--Parade; choose a new or empty folder."
    assert message in " ".join(err.split())
    (folder / "0--Parade").rmdir()
    assert "--checkpoint: no such file" in run(capsys, *words)[2], "an empty one will do"


def test_a_folder_that_is_read_only_is_told_before_the_work(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(
        SettingsError, match=r"--out: .*report.html cannot be written: its folder is read-only"
    ):
        check_destination(tmp_path / "report.html", "file", "--out")
    check_destination(Path("/dev/null"), "file", "--out")


def test_a_file_may_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text("{}")
    check_destination(tmp_path / "scores.json", "file", "--out")
    assert (tmp_path / "scores.json").read_text() == "{}"
