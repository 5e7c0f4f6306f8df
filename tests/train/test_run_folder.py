"""The folder of a run, and its display."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import sys
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml
from command_line import run
from rich.console import Console
from safetensors.torch import load_file
from small_runs import SILENT, TINY, image_folder, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import polynl
from polynl import cli
from polynl.errors import SettingsError
from polynl.results.formats import duration
from polynl.train.config import neutral_keys
from polynl.train.loop import train
from polynl.train.progress import Display, epoch_line, summary
from polynl.train.recipe_file import load_recipe, parse_recipe
from polynl.train.run_folder import RunFolder

# As many threads as the other tests have, or these would be left with others.
EPOCHS, STEPS, CLOCK = 3, 2, ("seconds", "images_per_second")
WORDS = ["--epochs", str(EPOCHS), "--seed", "7", "--schedule.name", "cosine", "--threads", "1"]


@dataclass(frozen=True)
class Finished:
    folder: Path
    output: str
    command: list[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One run from the command line, with its output and files."""
    folder, output = tmp_path_factory.mktemp("out of") / "my run", io.StringIO()
    command = ["train", str(TINY), *WORDS, "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setattr(sys, "argv", ["/somewhere/bin/polynl", *command])
        cli.main()
    return Finished(folder, output.getvalue(), command)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def test_the_files_of_a_run(finished: Finished) -> None:
    names = {path.name for path in finished.folder.iterdir()}
    weights = {f"{name}.{suffix}" for name in ("last", "best") for suffix in ("pt", "safetensors")}
    figures = {"metrics.csv", "metrics.json", "outcomes.npz", "tensorboard"}
    assert (
        names
        == {"recipe.yaml", "labels.json", "environment.json", "previous.pt", ".lock"} | weights | figures
    )


def test_the_recipe_says_all_and_gives_the_same_run(finished: Finished, tmp_path: Path) -> None:
    file = finished.folder / "recipe.yaml"
    assert load_recipe(file) == tiny(*WORDS)
    assert yaml.safe_load(file.read_text())["optimizer"]["momentum"] == 0.9, "defaults are written out"
    rows = train(load_recipe(file), tmp_path, SILENT)
    assert timeless(rows) == timeless(finished.rows)
    for name in ("last.safetensors", "best.safetensors"):
        again, before = load_file(tmp_path / name), load_file(finished.folder / name)
        assert again.keys() == before.keys()
        assert all(torch.equal(again[key], before[key]) for key in again)


def test_the_environment_has_versions_seed_and_command(finished: Finished) -> None:
    found = json.loads((finished.folder / "environment.json").read_text())
    assert found["polynl"] == polynl.__version__
    assert found["torch"] == torch.__version__.partition("+")[0]
    assert found["torchvision"] == torchvision.__version__.partition("+")[0]
    assert found["python"] == sys.version.split()[0]
    assert (found["seed"], found["processes"], found["device"]) == (7, 1, "cpu")
    assert shlex.split(found["command"]) == ["polynl", *finished.command], "it can be pasted into a shell"


def test_the_environment_has_the_threads_of_the_run(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        train(tiny("--epochs", "1", "--threads", "1"), tmp_path, SILENT)
    finally:
        torch.set_num_threads(threads)
    assert json.loads((tmp_path / "environment.json").read_text())["threads"] == 1


def test_csv_and_json_have_the_same_figures(finished: Finished) -> None:
    with open(finished.folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in row.items()} for row in table] == finished.rows
    assert [row["epoch"] for row in finished.rows] == [1, 2, 3]
    assert [row["step"] for row in finished.rows] == [STEPS, 2 * STEPS, 3 * STEPS]
    assert {row["images"] for row in finished.rows} == {16}
    assert {row["skipped"] for row in finished.rows} == {0}
    for row in finished.rows:
        assert math.isfinite(row["loss"])
        assert 0 <= row["top1"] <= 100
        last = 0.05 * (1 + math.cos(math.pi * (row["step"] - 1) / (EPOCHS * STEPS))) / 2
        assert row["lr"] == pytest.approx(last)


def test_tensorboard_has_the_curves(finished: Finished) -> None:
    events = EventAccumulator(str(finished.folder / "tensorboard"))
    events.Reload()
    curves = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert {
        "train/loss",
        "train/lr",
        "train/images_per_second",
        "val/top1",
        "block/layer3.0.share",
    } <= curves.keys()
    steps = {tag: [point.step for point in points] for tag, points in curves.items()}
    assert steps["train/loss"] == steps["train/lr"] == [1, 2, 3, 4, 5, 6]
    assert steps["val/top1"] == [2, 4, 6]
    top1 = [point.value for point in curves["val/top1"]]
    assert top1 == pytest.approx([row["top1"] for row in finished.rows])
    losses = [point.value for point in curves["train/loss"]]
    means = [(losses[step] + losses[step + 1]) / 2 for step in (0, 2, 4)]
    assert means == pytest.approx([row["loss"] for row in finished.rows], rel=1e-5)


def test_a_line_an_epoch_and_a_summary_are_printed(finished: Finished) -> None:
    for row in finished.rows:
        scores = f"top1 {row['top1']:.2f}"
        assert f"epoch {row['epoch']}/3  loss {row['loss']:.4f}  {scores}  lr" in finished.output
    table = finished.output[finished.output.index("3 epochs trained in") :]
    best, last = max(finished.rows, key=lambda row: row["top1"]), finished.rows[-1]
    (top1,) = [line for line in table.splitlines() if "top1" in line]
    cells = [cell.strip() for cell in top1.split("│")]
    assert cells[1:4] == ["top1", f"{best['top1']:.4g}", f"{last['top1']:.4g}"]
    assert "The run is in" in table
    assert "\x1b" not in finished.output, "there are no colours where there is no terminal"


def test_scores_between_are_left_out_where_they_are_not_due(tmp_path: Path) -> None:
    rows = train(tiny("--epochs", "3", "--evaluate-every", "2"), tmp_path, SILENT)
    assert ["top1" in row for row in rows] == [False, True, True]
    with open(tmp_path / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["top1"] == "" for row in table] == [True, False, False]


# What a run shows on a terminal


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140)


def shown(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]


def test_the_bar_shows_how_far_the_run_is_and_how_long_it_will_take() -> None:
    console = terminal()
    display = Display(console)
    display.begin(60, 20)
    for step in range(21, 31):
        display.step(step, f"epoch 2  loss [{step}]")
    display.say("a line that stays")
    display.end()
    last = [line for line in re.split(r"[\r\n]", shown(console)) if "30/60" in line][-1]
    assert re.search(r"━.* 30/60 \d:\d\d:\d\d epoch 2  loss \[30\]", last)
    assert "a line that stays" in shown(console)


class Noting(Display):
    """Records what is shown."""

    def __init__(self) -> None:
        super().__init__(None)
        self.steps: list[tuple[int, str]] = []

    def step(self, done: int, text: str) -> None:
        self.steps.append((done, text))


def test_the_bar_tells_epoch_loss_rate_and_speed(tmp_path: Path) -> None:
    display = Noting()
    rows = train(tiny("--optimizer.lr", "0.025"), tmp_path, SILENT, display=display)
    training = [(done, text) for done, text in display.steps if "loss" in text]
    assert [done for done, _ in training] == [1, 2, 3, 4]
    parts = [
        re.fullmatch(r"epoch (\d)  loss (\d+\.\d{4})  lr 0\.025  ([\d.]+) images/s", t) for _, t in training
    ]
    assert all(parts)
    assert [part[1] for part in parts if part] == ["1", "1", "2", "2"]
    losses = [float(part[2]) for part in parts if part]
    assert (losses[0] + losses[1]) / 2 == pytest.approx(rows[0]["loss"], abs=1e-4)
    assert next(text for _, text in display.steps if "scoring" in text) == "scoring epoch 1  0/2"


def test_a_run_on_a_terminal_has_a_bar_and_keeps_its_lines(tmp_path: Path) -> None:
    console = terminal()
    train(tiny(), tmp_path, console)
    text = shown(console)
    assert "4/4" in text
    assert text.count("epoch 1/2  loss") == 1
    assert "2 epochs trained in" in text


def test_without_a_terminal_there_is_no_bar() -> None:
    console = Console(file=io.StringIO(), width=140)
    display = Display(console)
    display.begin(6, 0)
    display.step(3, "half")
    display.end()
    assert shown(console) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "40.0 ms"), (59.4, "59.4 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"), (3600, "1 h 0 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_epoch_in_one_line() -> None:
    row = {"epoch": 3, "loss": 1.0, "top1": 50.0, "lr": 0.001, "images_per_second": 12.3, "seconds": 61}
    line = epoch_line({**row, "skipped": 0}, 90, ["top1"])
    assert line == "epoch  3/90  loss 1.0000  top1 50.00  lr 0.001  12.3 images/s  1 min 1 s"
    assert epoch_line({**row, "skipped": 2}, 90, []).endswith("  2 unreadable images skipped")


def test_the_summary_has_the_first_the_best_and_the_last_epoch() -> None:
    rows = [{"epoch": e, "top1": top1, "seconds": 1.0} for e, top1 in ((1, 30.0), (2, 50.0), (3, 40.0))]
    console = Console(file=io.StringIO(), width=80)
    console.print(summary(rows, "top1"))
    assert re.search(r"epoch +│ +1 +│ +2 +│ +3", shown(console))
    assert re.search(r"top1 +│ +30 +│ +50 +│ +40", shown(console))


# Start, resume and overwrite


def test_a_folder_with_a_run_is_not_overwritten_unasked(finished: Finished, capsys: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    code, _, err = run(capsys, "train", TINY, "--out", finished.folder)
    assert code == 2
    assert "already contains a run; continue it with --resume, replace it with --overwrite" in err
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before


def test_overwrite_leaves_nothing_of_the_run_before_and_keeps_files_of_others(tmp_path: Path) -> None:
    train(tiny("--epochs", "2"), tmp_path, SILENT)
    (tmp_path / "notes.txt").write_text("mine")
    train(tiny("--epochs", "1", "--seed", "9"), tmp_path, SILENT, overwrite=True)
    assert load_recipe(tmp_path / "recipe.yaml").seed == 9
    assert len(json.loads((tmp_path / "metrics.json").read_text())) == 1
    assert not (tmp_path / "previous.pt").exists()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwrite_leaves_no_checkpoint_of_a_run_without_its_recipe(tmp_path: Path) -> None:
    """Or a run that is killed before its first checkpoint would be resumed from another run's."""
    for name in ("last.pt", "previous.pt", "best.pt"):
        (tmp_path / name).write_bytes(b"of another run")
    train(tiny("--epochs", "1"), tmp_path, SILENT, overwrite=True)
    assert not (tmp_path / "previous.pt").exists()


def test_one_run_has_one_recipe(finished: Finished, capsys: Any) -> None:
    words = ["train", TINY, *WORDS, "--optimizer.lr", "0.5", "--model.options.form", "gram", "--resume"]
    code, _, err = run(capsys, *words, "--out", finished.folder)
    assert code == 2
    assert "was started with another recipe; it can only be continued as it was:" in err
    assert "  optimizer.lr: 0.05 → 0.5\n" in err
    assert "  model.options.form: None → gram\n" in err
    harmless = ["--workers", "0", "--threads", "1", "--checkpoint-every", "3", "--val-batch", "5"]
    assert run(capsys, "train", TINY, *WORDS, *harmless, "--out", finished.folder, "--resume")[0] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scenes", set()),
        ("imagenet", {"data.root", "data.on_bad_image", "data.labels"}),
        ("coco", {"data.root", "data.on_bad_image"}),
        ("wider_face", {"data.root", "data.on_bad_image", "data.ground_truth"}),
    ],
)
def test_keys_that_may_change_when_a_run_resumes(name: str, expected: set[str]) -> None:
    always = {"workers", "threads", "device", "checkpoint_every", "val_batch", "keep_checkpoints"}
    assert neutral_keys(load_recipe(name)) == always | expected


@pytest.mark.parametrize("content", ["[", "- 1", "task: nothing", "\xff"])
def test_a_damaged_recipe_in_the_folder_is_told(content: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(content, encoding="latin-1")
    with closing(RunFolder(tmp_path)) as folder, pytest.raises(SettingsError, match=r"recipe\.yaml"):
        folder.open(tiny(), resume=True, overwrite=False)


def test_a_start_that_failed_needs_no_overwrite(tmp_path: Path, capsys: Any) -> None:
    words = ["train", TINY, "--out", tmp_path / "out", "--epochs", "1"]
    code, _, err = run(capsys, *words, "--batch", "30")
    assert code == 2
    assert "batch: a step needs 30 images, but there are only 20: set --batch to" in err
    code, _, err = run(capsys, *words)
    assert (code, err) == (0, "")


def test_somebody_elses_recipe_is_not_overwritten(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(TINY.read_text())
    code, _, err = run(capsys, "train", file, "--out", tmp_path)
    assert code == 2
    assert "already contains a run" in err
    assert file.read_text() == TINY.read_text()


def test_two_runs_cannot_share_a_folder(tmp_path: Path, capsys: Any) -> None:
    with closing(RunFolder(tmp_path)) as first, closing(RunFolder(tmp_path)) as second:
        first.open(tiny(), resume=False, overwrite=False)
        with pytest.raises(SettingsError, match="another process is training in"):
            second.open(tiny(), resume=True, overwrite=False)
        first.close()
        second.open(tiny(), resume=True, overwrite=False)


def test_skipped_images_are_told_and_noted(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "images", classes=2, images=4)
    (root / "train/class0/1.png").write_bytes(b"no image")
    words = ["--data.source", "image_folder", "--data.root", str(root), "--data.size", "16", "--data.resize"]
    console = Console(file=io.StringIO(), width=300)
    recipe = tiny(*words, "20", "--data.on-bad-image", "skip", "--epochs", "1")
    (row,) = train(recipe, tmp_path / "run", console)
    assert row["skipped"] == 1
    assert "skipped: " in shown(console)
    assert "class0/1.png" in shown(console)
    assert "1 unreadable image skipped" in shown(console)
    assert parse_recipe(yaml.safe_load((tmp_path / "run/recipe.yaml").read_text()), "it") == recipe


@pytest.mark.parametrize(
    ("keys", "inside"), [([], "train/runs"), ([], "val"), (["--data.train", "."], "runs")]
)
def test_a_run_is_not_written_among_the_images(keys: list[str], inside: str, tmp_path: Path) -> None:
    root = image_folder(tmp_path / "insects", 2)
    recipe = tiny("--data", f"{{source: image_folder, root: {root}}}", *keys)
    with closing(RunFolder(root / inside)) as folder, pytest.raises(SettingsError) as said:
        folder.open(recipe, resume=False, overwrite=False)
    assert "which holds the images: choose a folder elsewhere." in str(said.value)
    assert not (root / inside / "recipe.yaml").exists()
    with closing(RunFolder(root / "beside")) as folder:
        folder.check_place(tiny("--data", f"{{source: image_folder, root: {root}}}"))
