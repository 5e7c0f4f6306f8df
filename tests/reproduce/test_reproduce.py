"""`polynl reproduce` trains, scores, times and writes; it goes on where it was stopped, and loses nothing."""

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import matplotlib.image
import numpy as np
import pytest
import torch
from fork_server import fork_server
from PIL import Image
from rich.console import Console

from polynl import BLOCKS, cli
from polynl.errors import RunStoppedError
from polynl.report.load import load_runs
from polynl.reproduce import timing
from polynl.reproduce.run import plan_trainings
from polynl.reproduce.settings import VARIANTS, ReproduceSettings
from polynl.reproduce.timing import METHODS, layer_settings, measure_layers
from polynl.results.benchmark import Results
from polynl.results.study import Training, row_label
from polynl.results.tables import accuracy_table
from polynl.tasks.registry import task_class
from polynl.train.recipe_file import load_recipe, to_yaml

TINY = [
    *(
        "--epochs",
        "1",
        "--batch",
        "32",
        "--val-batch",
        "20",
        "--jobs",
        "2",
        "--model.arch-options.width",
        "4",
    ),
    *("--data.images", "64", "--data.val-images", "40", "--data.size", "24"),
]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = 0
    try:
        cli.main(["reproduce", *map(str, words)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), err


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    fork_server()


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few, and without figures: drawing takes longer than timing."""
    sizes = {"runs": 1, "channels": (4, 8), "at_side": 4, "sides": (4, 6), "at_channels": 4}
    monkeypatch.setattr(timing, "SIZES", sizes)
    monkeypatch.setattr("polynl.bench.layers.save_layer_figures", lambda *_: [])


def test_everything_is_trained_once_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    code, shown, err = run(capsys, *TINY, "--blocks", "poly_nl", "--out", out)
    assert (code, err) == (0, "")
    content = json.loads((out / "results.json").read_text())
    assert [outcome["block"] for outcome in content["outcomes"]] == ["none", "poly_nl"]
    for outcome in content["outcomes"]:
        folder = out / f"{outcome['block']}-seed0"
        assert outcome["top1"] == [json.loads((folder / "metrics.json").read_text())[-1]["top1"]]
        assert f"{outcome['top1'][0]:.1f}" in (out / "results.md").read_text()
        assert f"{outcome['top1'][0]:.1f}" in shown
        assert outcome["forward_seconds"] > 0
        assert outcome["training_seconds"] > 0
    plain, poly_nl = content["outcomes"]
    assert poly_nl["parameters"] > plain["parameters"]
    assert poly_nl["multiply_adds"] > plain["multiply_adds"]
    for name in ("curves.png", "accuracy_and_cost.png"):
        picture = matplotlib.image.imread(out / name)
        assert picture.shape[0] > 400
        assert picture[..., :3].std() > 0.05, "an empty picture"
    page = (out / "report.html").read_text()
    assert f"{plain['top1'][0]:.1f}" in page
    assert "The report is in" in shown
    (study,) = load_runs([out]).studies
    assert [variant.last("top1") for variant in study.variants] == [plain["top1"], poly_nl["top1"]]
    timed = json.loads((out / "layers" / "layers.json").read_text())["measurements"]

    code, _, err = run(capsys, *TINY, "--blocks", "poly_nl", "--out", out)
    assert code == 2
    assert "--resume" in err
    weights = out / "poly_nl-seed0" / "last.safetensors"
    written = weights.stat().st_mtime_ns
    assert run(capsys, *TINY, "--blocks", "poly_nl", "--out", out, "--resume")[0] == 0
    assert weights.stat().st_mtime_ns == written, "a finished training was trained again"
    kept = json.loads((out / "layers" / "layers.json").read_text())["measurements"]
    assert kept == timed, "layers were timed again"

    code, _, err = run(
        capsys, *TINY, "--blocks", "poly_nl", "--out", out, "--resume", "--optimizer.lr", "0.5"
    )
    assert code == 2
    assert "optimizer.lr: 0.004 → 0.5" in err
    assert weights.stat().st_mtime_ns == written


def test_a_training_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*TINY, "--blocks", "none", "--out", tmp_path, "--optimizer.lr", "1e30", "--epochs", "3")
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "the loss is not finite" in err
    assert "Traceback" not in err
    assert not (tmp_path / "results.json").exists()


def test_overwriting_deletes_the_trainings_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to where the trainings begin, which then start from nothing."""
    (tmp_path / "mine.txt").write_text("keep")
    before = tmp_path / "none-seed0"
    before.mkdir()
    (before / "recipe.yaml").write_text("of an earlier run")
    begun = []

    def stop(trainings: Sequence[Training], jobs: int, console: Console) -> NoReturn:
        begun.extend((training.folder, training.folder.exists()) for training in trainings)
        raise RunStoppedError("far enough")

    monkeypatch.setattr("polynl.reproduce.run.train_all", stop)
    words = (*TINY, "--blocks", "none", "--out", tmp_path)
    assert run(capsys, *words)[0] == 2, "not unasked"
    assert before.exists()
    code, _, err = run(capsys, *words, "--overwrite")
    assert (code, begun) == (1, [(before, False)])
    assert "far enough" in err
    assert (tmp_path / "mine.txt").read_text() == "keep"


def insects(folder: Path) -> Path:
    """Images of two classes, which are noise."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 5)):
        for name in ("ant", "bee"):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (32, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def test_trainings_are_not_taken_for_those_on_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, moved = (insects(tmp_path / name) for name in ("one", "two", "elsewhere/one"))
    for seed in (0, 1):
        folder = tmp_path / "out" / f"none-seed{seed}"
        folder.mkdir(parents=True)
        words = ["--model.block", "none", "--data.root", str(one), "--seed", str(seed), "--threads", "1"]
        (folder / "recipe.yaml").write_text(to_yaml(load_recipe("folder", words)))
        (folder / "metrics.json").write_text("[{}]")
    words = ("--blocks", "none", "--jobs", 1, "--out", tmp_path / "out", "--resume")
    code, _, err = run(capsys, "--data", two, *words)
    assert code == 2
    assert (
        f"was started with other data; it can only be continued as it was: data.root: {one} → {two}"
        in " ".join(err.split())
    )
    code, shown, err = run(capsys, "--data", moved, *words)
    assert "but not chosen by --blocks and --seeds: none-seed1." in shown
    assert code == 2
    assert "metrics.json does not have the rows that `polynl train` writes: KeyError('epoch')" in err
    assert "delete the folder to train again" in err


def test_on_a_folder_of_images_and_without_timings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The report is the same whatever the images are.
    monkeypatch.setattr("polynl.reproduce.run.write_report", lambda *_: None)
    insects(tmp_path / "insects")
    keys = ["--epochs", 1, "--batch", 16, "--model.arch-options", "{depth: 1, width: 4}"]
    keys += ["--data.size", 24, "--data.resize", 28, "--workers", 1]
    out = tmp_path / "out"
    words = ["--data", tmp_path / "insects", "--blocks", "none", "--no-timings", "--out"]
    # Folders of runs would be classes for all who train on these images.
    inside = tmp_path / "insects" / "train"
    code, _, err = run(capsys, *words, inside, *keys)
    assert (code, "which holds the images: choose a folder elsewhere." in " ".join(err.split())) == (2, True)
    assert sorted(folder.name for folder in inside.iterdir()) == ["ant", "bee"]
    code, shown, err = run(capsys, *words, out, *keys)
    assert (code, err) == (0, "")
    assert "insects" in shown
    (outcome,) = json.loads((out / "results.json").read_text())["outcomes"]
    assert outcome["top1"][0] % 10 == 0, "ten images were scored"
    assert "top5" not in outcome, "there are two classes"
    assert outcome["parameters"] > 0
    assert outcome["forward_seconds"] is outcome["training_seconds"] is None
    assert "forward" not in shown
    assert not (out / "layers").exists()
    assert not (out / "accuracy_and_cost.png").exists()
    (study,) = load_runs([out]).studies
    assert accuracy_table(study).columns[-1].headings == ["parameters", "multiply-adds"]


def test_from_a_recipe_of_another_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "RUNS", 1)
    recipe, out = Path(__file__).parents[1] / "tiny_faces.yaml", tmp_path / "out"
    code, shown, err = run(capsys, "--recipe", recipe, "--blocks", "poly_nl", "--epochs", 1, "--out", out)
    assert (code, err) == (0, "")
    content = json.loads((out / "results.json").read_text())
    assert [outcome["block"] for outcome in content["outcomes"]] == ["none", "poly_nl"]
    assert all(
        min(outcome["forward_seconds"], outcome["training_seconds"]) > 0 for outcome in content["outcomes"]
    )
    assert all(len(outcome["hard_ap"]) == 1 for outcome in content["outcomes"])
    assert "Hard AP" in shown
    assert "Face detector" in (out / "report.html").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_stops_the_trainings_too(number: signal.Signals, code: int, tmp_path: Path) -> None:
    words = [*TINY, "--epochs", "10000", "--blocks", "none", "--out", str(tmp_path)]
    process = fork_server().Process(target=_reproduce, args=(words, tmp_path / "err.txt"))
    process.start()
    folder = tmp_path / "none-seed0"
    _wait_for((folder / "last.pt").exists)
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode == code
    if number == signal.SIGKILL:  # which lets nobody wait for them: they find out by themselves
        _wait_for(lambda: not _trains(folder))
    else:
        assert "continue with --resume" in (tmp_path / "err.txt").read_text()
    assert not _trains(folder)


def _reproduce(words: Sequence[str], errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    cli.main(["reproduce", *words])


def _trains(folder: Path) -> bool:
    """Whether a process trains in the folder: it holds the lock."""
    with open(folder / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blocks", "polynl"], "no block is called 'polynl'. Did you mean poly_nl"),
        (["--seeds", "-1"], "--seeds -1"),
        (["--jobs", "0"], "--jobs 0"),
        (["--seeds", "0", "3", "0"], "--seeds: 0 is given more than once."),
        (["--seeds"], "--seeds: expected at least one."),
        (["--blocks"], "--blocks: expected at least one."),
        (["--resume", "--overwrite"], "choose one of them"),
        (["--data", "no/such/folder"], "no such folder: no/such/folder"),
        (["--epoch", "3"], "epoch: there is no such key. Did you mean epochs"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_done(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--out", tmp_path / "out", *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [["--seed", "5"], ["--model.block", "tesa"], ["--model.options.reduction", "2"], ["--seed=5"]]
)
def test_keys_in_which_trainings_differ_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--out", tmp_path / "out", *words)
    assert code == 2
    assert f"{words[0]}: trainings differ in this key; choose them with --" in " ".join(err.split())


def test_one_training_for_every_block_and_seed() -> None:
    settings = ReproduceSettings(seeds=(0, 3), blocks=("tesa",))
    trainings = plan_trainings(settings, ["--epochs", "7"], threads=1)
    assert [(t.row, t.seed) for t in trainings] == [("none", 0), ("tesa", 0), ("none", 3), ("tesa", 3)]
    assert {t.recipe["epochs"] for t in trainings} == {7}
    assert [t.recipe["seed"] for t in trainings] == [0, 0, 3, 3]
    assert len({t.folder for t in trainings}) == 4


def test_the_blocks_are_those_that_the_paper_trains_on_imagenet() -> None:
    *blocks, reduced, conv = ReproduceSettings().selected()
    assert blocks == ["none", "non_local", "tesa", "latent_gnn", "efficient_nl", "poly_nl"]
    paper = task_class("classification").paper
    assert paper is not None
    assert list(paper.rows) == blocks
    assert (reduced, conv) == ("poly_nl_reduced", "conv")


def test_all_blocks_can_be_trained_by_their_names() -> None:
    everything = ReproduceSettings(blocks=("all",))
    assert everything.selected() == list(VARIANTS)
    assert {VARIANTS[name][0] for name in everything.selected()} == {"none", *BLOCKS}
    trainings = plan_trainings(everything, [], threads=1)
    assert len({t.row for t in trainings}) == len({t.folder for t in trainings}) == len(VARIANTS)
    labels = {row_label(t.row) for t in trainings}
    assert {"Non-local", "Non-local, softmax", "SE", "Poly-NL (reduction=4)"} <= labels
    for block in BLOCKS:
        assert ReproduceSettings(blocks=(block,)).selected() == ["none", block]


def test_layers_of_the_trained_blocks_are_timed(tmp_path: Path) -> None:
    settings = ReproduceSettings(out=tmp_path, blocks=("se", "conv", "non_local_softmax"))
    timed = layer_settings(settings, overwrite=True).blocks
    assert timed == (*METHODS, "non_local_softmax", "se")


def test_controls_have_options_of_their_own_and_no_row_of_the_paper() -> None:
    settings = ReproduceSettings(blocks=("poly_nl", "poly_nl_reduced", "conv"))
    trainings = plan_trainings(settings, [], threads=1)
    rows = {t.folder.name: t.row for t in trainings}
    assert rows == {
        "none-seed0": "none",
        "poly_nl-seed0": "poly_nl",
        "poly_nl_reduced-seed0": "poly_nl(reduction=4)",
        "conv-seed0": "conv(residual=True)",
    }
    assert [t.recipe["model"]["options"] for t in trainings] == [{}, {}, {"reduction": 4}, {"residual": True}]


@pytest.mark.parametrize("recipe", ["scenes", "scenes_instances", "scenes_faces"])
def test_variants_with_one_seed_start_from_the_same_host_weights(recipe: str) -> None:
    found = []
    for block in ("none", "poly_nl", "tesa"):
        task = load_recipe(recipe, ["--model.block", block]).build_task()
        torch.manual_seed(3)
        state = task.model().state_dict()
        found.append({name: value for name, value in state.items() if "polynl_" not in name})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(value.equal(found[0][name]) for name, value in other.items())


def test_layers_are_timed_anew_where_times_would_not_belong_together(tmp_path: Path) -> None:
    settings = ReproduceSettings(out=tmp_path)
    first = measure_layers(settings)
    assert list(first.methods) == list(METHODS)
    path = tmp_path / "layers" / "layers.json"
    content = json.loads(path.read_text())
    content["environment"]["torch"] = "0.1"
    path.write_text(json.dumps(content))
    again = measure_layers(settings)
    assert again.environment == first.environment
    assert Results.load(path).environment == first.environment


def test_layers_of_a_quick_look_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    quick, full = (
        layer_settings(ReproduceSettings(out=tmp_path, quick=quick), overwrite=True)
        for quick in (True, False)
    )
    assert set(quick.sides) < set(full.sides)
    assert set(quick.channels) < set(full.channels)
    assert (quick.runs, full.runs) == (5, 20)
