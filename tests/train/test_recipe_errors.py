"""A mistake in a recipe gives a short message with the key and exit code 2, and leaves no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from small_runs import TINY, image_folder

from polynl.tasks import registry
from polynl.tasks.classification import config as classification
from polynl.train import loop
from polynl.train.recipe_file import BUILT_IN, parse_recipe

NAMES = [file.stem for file in sorted(BUILT_IN.glob("*.yaml"))]
TASKS = ", ".join(registry.TASKS)


@pytest.fixture(autouse=True)
def _nothing_trains(monkeypatch: Any) -> None:
    def trained(self: object) -> None:
        raise AssertionError("the mistake was not noticed")

    monkeypatch.setattr(loop.Trainer, "run", trained)


def refused(capsys: Any, folder: Path, *words: object) -> str:
    """The error message; `folder` must be left unchanged."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("polynl: ")
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 8
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    return err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # A key that is not there, at every level.
        ("--epoch 3", "epoch: there is no such key. Did you mean epochs?"),
        ("--batchsize 3", "batchsize: there is no such key. Did you mean batch"),
        ("--optimizer.lrr 3", "optimizer.lrr: there is no such key. Did you mean lr?"),
        ("--optimizer.l 3", "Keys here: name, lr, lr_batch, momentum"),
        ("--schedule.warmup 3", "schedule.warmup: there is no such key. Did you mean warmup"),
        ("--model.blok x", "model.blok: there is no such key. Did you mean block?"),
        ("--data.imges 3", "data.imges: there is no such key. Did you mean images"),
        ("--data.root x", "data.root: there is no such key."),
        ("--data.scale x", "Keys here: source, images, val_images, size, seed, difficulty, mean, std."),
        ("--loss.smoothing 0.1", "loss.smoothing: there is no such key. Did you mean label_smoothing?"),
        ("--base other.yaml", "base: there is no such key."),
        # What was meant is an option of the command.
        ("--outt there", "outt: there is no such key. Did you mean out?"),
        ("--resum", "--resum needs a value. Did you mean resume?"),
        ("--overwrit", "--overwrit needs a value. Did you mean overwrite?"),
        ("--list", "--list needs a value. Did you mean list-keys?"),
        # No value, no key, more than one value.
        ("--epochs", "--epochs needs a value."),
        ("--epochs --seed 3", "--epochs needs a value."),
        ("--epochs=", "epochs: expected a valid integer (got None)"),
        ("epochs 3", "unexpected argument 'epochs'. Override keys of the recipe with --key value"),
        (
            "--schedule.milestones 3 4",
            "unexpected argument '4'. Override keys of the recipe with --key value or --key [a,b]",
        ),
        ("--schedule.milestones 3", "schedule.milestones: expected a list, as in [1, 2] (got 3)"),
        ("--schedule.milestones [3", "--schedule.milestones [3: line 1, column 3: expected ',' or ']'"),
        ("--optimizer..lr 3", "unexpected argument '--optimizer..lr'."),
        ("--=3", "unexpected argument '--=3'."),
        ("-e 3", "unexpected argument '-e'."),
        ("--resume yes", "unexpected argument 'yes'."),
        # A value of the wrong kind.
        ("--epochs many", "epochs: expected a valid integer"),
        ("--epochs 2.5", "(got 2.5)"),
        ("--epochs 0", "epochs: expected greater than 0 (got 0)"),
        ("--seed -1", "seed: expected greater than or equal to 0 (got -1)"),
        ("--seed=-1", "seed: expected greater than or equal to 0 (got -1)"),
        ("--channels-last maybe", "channels_last: expected a valid boolean"),
        ("--precision float8", "precision: expected 'float32', 'bfloat16' or 'float16' (got 'float8')"),
        ("--device cuda:1", "device: expected 'auto', 'cpu' or 'cuda' (got 'cuda:1')"),
        ("--optimizer 3", "optimizer: expected keys and values (got 3)"),
        ("--optimizer.lr.x 3", "--optimizer.lr.x: optimizer.lr is 0.05 and has no keys below it."),
        ("--optimizer.lr high", "optimizer.lr: expected a valid number"),
        ("--model.arch_options 3", "model.arch_options: expected keys and values (got 3)"),
        ("--model.placement 3", "or the name of a module, got '3'"),
        ("--data scenes", "data: expected keys and values (got 'scenes')"),
        ("--data.source null", "data.source: must be one of image_folder, scenes"),
        ("--data.mean [0,0]", "data.mean.2: is missing."),
        # Values that make no sense.
        ("--optimizer.lr 0", "optimizer.lr: expected greater than 0 (got 0)"),
        ("--optimizer.lr -1e-3", "optimizer.lr: expected greater than 0 (got -0.001)"),
        ("--optimizer.lr .inf", "optimizer.lr: expected a finite number (got inf)"),
        ("--optimizer.lr .nan", "optimizer.lr: expected a finite number (got nan)"),
        ("--optimizer.momentum 1", "optimizer.momentum: expected less than 1 (got 1)"),
        ("--optimizer.betas [0.9,1]", "optimizer.betas.1: expected less than 1 (got 1)"),
        ("--optimizer.nesterov true --optimizer.momentum 0", "optimizer: nesterov needs a momentum above 0"),
        ("--optimizer.clip-norm 0", "optimizer.clip_norm: expected greater than 0 (got 0)"),
        ("--schedule.milestones [3,2]", "schedule.milestones: expected epochs above 0 in increasing order"),
        ("--schedule.milestones [2,2]", "schedule.milestones: expected epochs above 0 in increasing order"),
        ("--schedule.milestones [0,2]", "schedule.milestones: expected epochs above 0 in increasing order"),
        ("--schedule.milestones [-1]", "schedule.milestones: expected epochs above 0 in increasing order"),
        ("--schedule.warmup-epochs 2.5", "schedule: warmup_epochs=2.5 is more than epochs=2"),
        ("--schedule.warmup-epochs -1", "schedule.warmup_epochs: expected greater than or equal to 0"),
        ("--schedule.gamma 0", "schedule.gamma: expected greater than 0 (got 0)"),
        ("--data.std [0.2,0,0.2]", "data.std.1: expected greater than 0 (got 0)"),
        ("--data.size 8", "data.size: expected greater than or equal to 16 (got 8)"),
        ("--data.seed -1", "data.seed: expected greater than or equal to 0 (got -1)"),
        ("--data.seed 1e30", "data.seed: "),
        ("--loss.label-smoothing 1", "loss.label_smoothing: expected less than 1 (got 1)"),
        ("--batch-per-process 3", "give either batch (over all processes) or batch_per_process"),
        ("--batch null", "give either batch (over all processes) or batch_per_process"),
        # Numbers with digits too many.
        ("--epochs 1000000000", "epochs: expected less than or equal to 1000000 (got 1000000000)"),
        ("--threads 1000000", "threads: expected less than or equal to 1024 (got 1000000)"),
        ("--workers 1000000", "workers: expected less than or equal to 256 (got 1000000)"),
        ("--data.images 1000000", "data.images: expected less than or equal to 500000 (got 1000000)"),
        ("--data.size 1000000", "data.size: expected less than or equal to 16384 (got 1000000)"),
        ("--data.images 500000 --data.size 64", "take 6 GB of memory; at most 4 GB are drawn."),
        # Names.
        (
            "--task clasification",
            f"task must be one of {TASKS}; got 'clasification'. Did",
        ),
        ("--task null", f"task must be one of {TASKS}; got None."),
        (
            "--task [classification]",
            f"task must be one of {TASKS}; got ['classification'].",
        ),
        (
            "--data.source folder",
            "; got 'folder'. Did you mean image_folder?",
        ),
        ("--data.source image_folder", "data.root: is missing."),
        ("--data.difficulty midium", "data.difficulty: expected 'easy', 'medium' or 'hard' (got 'midium')"),
        ("--optimizer.name adam", "optimizer.name: expected 'sgd' or 'adamw' (got 'adam')"),
        ("--model.arch resnet55", "model.arch: no network is called 'resnet55'. Did you mean resnet50"),
        ("--model.arch fcn_resnet50", "model.arch: no network is called 'fcn_resnet50'."),
        ("--model.arch-options.dept 3", "model.arch_options: small_resnet has no option 'dept'. Did"),
        ("--model.arch-options.num_classes 3", "small_resnet has no option 'num_classes'."),
        ("--model.arch resnet18", "model.arch_options: resnet18 has no option 'depth'."),
        ("--model.block poly_nll", "model.block: no block is called 'poly_nll'. Did you mean poly_nl"),
        ("--model.block 3", "model.block: expected a valid string (got 3)"),
        ("--model.options.fomr gram", "model.options: poly_nl has no option 'fomr'"),
        ("--model.options.fomr gram", "Did you mean form"),
        ("--model.block none --model.options.form gram", "model.options: options without a block: form"),
        ("--model.block polynomial --model.options.order 1000000", "order=1000000: expected at most 4096"),
        (
            "--model.block latent_gnn --model.options.latent_dims [9,5000]",
            "latent_dims=[9, 5000]: expected at",
        ),
        (
            "--model.block tesa --model.options.device 0",
            "polynl sets device of the block itself; leave it out",
        ),
        ("--model.norm fozen", "model.norm: expected 'batch', 'sync' or 'frozen' (got 'fozen')"),
    ],
)
def test_a_mistake_on_the_command_line(words: str, expected: str, capsys: Any, here: Path) -> None:
    assert expected in refused(capsys, here, "train", TINY, *words.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model.placement res9", "placement must be one of res3, res4, res5, res345 or the name of"),
        ("--model.placement res5", "model: placement 'res5' needs a layer4, and SmallResNet has none"),
        ("--model.placement [res4,layer3.0]", 'model: there is already a block before "layer3.0"'),
        ("--model.placement []", "model.placement: List should have at least 1 item"),
        ("--model.options.form grom", "model: form='grom': expected one of 'auto', 'direct', 'gram'"),
        ("--model.options.reduction -1", "model: reduction=-1: expected a whole number above 0"),
        (
            "--model.arch-options.width wide",
            "model.arch_options: width of small_resnet: expected a whole number above 0, got 'wide'",
        ),
        ("--model.arch-options.width 5", "model: width=5: expected an even number"),
        ("--model.arch-options.width 1000000", "model: width=1000000: expected an even number up to 1024"),
        ("--model.arch-options.depth 1000000", "model: depth=1000000: expected at most 256"),
        ("--model.arch-options.dropout 2", "model: dropout=2: expected a number from 0 to 1"),
        ("--model.stride-in-1x1 true", "model: stride_in_1x1 needs bottleneck blocks"),
        ("--model.placement bn1 --model.norm frozen", "model.norm: frozen replaces the norm that bn1."),
        ("--model.placement bn1 --model.norm sync", "model.norm: sync replaces the norm that bn1."),
        ("--model.weights nowhere.pt", "model.weights: no such file: nowhere.pt."),
        ("--device cuda", "device: cuda was requested, but PyTorch finds no CUDA device."),
    ],
)
def test_what_cannot_be_built_is_refused_before_images_are_loaded(
    words: str, expected: str, capsys: Any, here: Path, monkeypatch: Any
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("images were drawn first")

    monkeypatch.setattr(classification, "Scenes", drawn)
    assert expected in refused(capsys, here, "train", TINY, *words.split())


def test_weights_of_another_network_are_refused_before_anything_is_written(capsys: Any, here: Path) -> None:
    torch.save({"fc.weight": torch.zeros(3, 3)}, "other.pt")
    err = refused(capsys, here, "train", TINY, "--model.weights", "other.pt")
    assert "model.weights: 'other.pt' does not fit the SmallResNet, " in err
    assert "these shapes differ: fc.weight is (3, 3), expected (6, 32)" in err


def test_several_mistakes_are_all_listed(capsys: Any, here: Path) -> None:
    words = ["--epochs", "many", "--optimizer.lr", "-1", "--model.blok", "x", "--model.arhc", "y"]
    err = refused(capsys, here, "train", TINY, *words, "--batch", "null")
    for key in ("epochs", "optimizer.lr", "model.blok", "model.arhc", "batch_per_process"):
        assert f"\n  {key}: " in err
    assert err.count("Keys here: ") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--data.root nowhere", "data.root: no such folder: nowhere. Give yours: --data.root DIR"),
        ("--data.root images --data.val test", "data.root: images has no folder 'test'."),
        ("--data.root images --data.train trian", "Did you mean train?"),
        ("--data.root images/train", "data.root: images/train has no folder 'train'."),
        ("--data.root bare", "data.root: bare/train needs at least two folders of classes; found none."),
        (
            "--data.root single",
            "data.root: single/train needs at least two folders of classes; found class0.",
        ),
        ("--data.root odd", "have different classes: only train has class1; only val has klass1."),
        (
            "--data.scale [1,0.08]",
            "data.scale: expected [from, to] with 0 < from <= to <= 1; got [1.0, 0.08]",
        ),
        ("--data.scale [0,1]", "data.scale: expected [from, to]"),
        ("--data.scale [0.5,2]", "data.scale: expected [from, to]"),
        ("--data.resize 200", "data.resize: a side of 200 is too short to cut size=224 out of it"),
        ("--data.size 288", "data.resize: a side of 256 is too short to cut size=288 out of it"),
        ("--data.flip 2", "data.flip: expected less than or equal to 1 (got 2)"),
        ("--data.rooot x", "data.rooot: there is no such key. Did you mean root?"),
        (
            "--data.images 3",
            "Keys here: source, root, train, val, on_bad_image, flip, mean, std, size, resize, scale, "
            "colour_jitter, interpolation, upright, held_out, labels.",
        ),
        ("--data.on-bad-image ignore", "data.on_bad_image: expected 'stop' or 'skip' (got 'ignore')"),
    ],
)
def test_a_mistake_about_images_on_disk(words: str, expected: str, capsys: Any, here: Path) -> None:
    image_folder(here / "images", classes=2, images=1)
    image_folder(here / "single", classes=1, images=1)
    image_folder(here / "odd", classes=2, images=1)
    (here / "odd/val/class1").rename(here / "odd/val/klass1")
    (here / "bare/train").mkdir(parents=True)
    (here / "bare/val").mkdir()
    given = words if "--data.root" in words else f"--data.root images {words}"
    words_for_folder = ["--data.source", "image_folder", *given.split()]
    assert expected in refused(capsys, here, "train", TINY, *words_for_folder)


GOOD = TINY.read_text()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1, 2\nb: 3\n", "cannot be read as YAML: line 2, column 2: expected ',' or ']', but got ':'."),
        ("task: classification\n\tbatch: 3\n", "line 2, column 1: found character '\\t'"),
        ("- a\n- b\n", "is not a recipe: expected keys and values, got list."),
        ("just words", "is not a recipe: expected keys and values, got str."),
        ("", "is not a recipe: expected keys and values, got nothing."),
        ("task: klassifizier\xe4ng", "is not UTF-8 text: invalid continuation byte at byte 18."),
        ("task: \0", "cannot be read as YAML: unacceptable character"),
        ("!!python/object/apply:os.mkdir [pwned]", "could not determine a constructor for the tag"),
        (GOOD + "epochs: 3\n", "line 19, column 1: epochs is given twice."),
        (GOOD.replace("lr: 0.05", "lr: 1\n  lr: 2"), "lr is given twice."),
        (GOOD + "3: 4\n", "  3: Keys should be strings"),
        (GOOD.replace("epochs: 2", "epochs: two"), "  epochs: expected a valid integer"),
        (GOOD.replace("epochs: 2\n", ""), "  epochs: is missing."),
        (
            GOOD.replace("images: 20", "imags: 20"),
            "  data.imags: there is no such key. Did you mean images",
        ),
        (GOOD.replace("  source: scenes\n", ""), "  data.source: is missing."),
        (
            GOOD.replace("optimizer:\n  lr: 0.05", "optimizer:"),
            "  optimizer: expected keys and values (got None)",
        ),
        ("base: bad.yaml\n", "bad.yaml: its bases lead back to itself."),
        ("base: loop.yaml\n", "its bases lead back to itself."),
        ("base: nowhere.yaml\n", "bad.yaml: there is no base nowhere.yaml."),
        ("base: [a, b]\n", "bad.yaml: there is no base ['a', 'b']."),
        ("base: /\n", "bad.yaml: there is no base /."),
        ("base: chain0.yaml\n", "bad.yaml: its base has a base, and so on, more than 20 times."),
        ("a: " + 900 * "[" + 900 * "]", "cannot be read as YAML: it is nested too deeply."),
        ("a: " + 30 * "[" + 30 * "]", "is not a recipe: it is nested more than 20 levels deep, or has more"),
        ("a: &a [*a]", "is not a recipe: it is nested more than 20 levels deep"),
        (
            "a0: &a0 [1]\n"
            + "".join(f"a{n + 1}: &a{n + 1} [{', '.join(9 * [f'*a{n}'])}]\n" for n in range(9)),
            "or has more than 100,000 values.",
        ),
        ("base: list.yaml\n", "list.yaml is not a recipe: expected keys and values, got list."),
    ],
)
def test_a_mistake_in_a_file(content: str, expected: str, capsys: Any, here: Path) -> None:
    (here / "bad.yaml").write_bytes(content.encode("latin-1" if "\xe4" in content else "utf-8"))
    (here / "loop.yaml").write_text("base: bad.yaml\n")
    (here / "list.yaml").write_text("[1]\n")
    for number in range(30):
        (here / f"chain{number}.yaml").write_text(f"base: chain{number + 1}.yaml\n")
    err = refused(capsys, here, "train", "bad.yaml")
    assert expected in err
    assert "bad.yaml" in err or "base" in content


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("scens", "there is no recipe scens. Did you mean scenes"),
        ("recipes/wider_fase.yml", "there is no recipe recipes/wider_fase.yml. Did you mean wider_face"),
        (
            "nowhere.yaml",
            f"polynl comes with: {', '.join(file.stem for file in sorted(BUILT_IN.glob('*.yaml')))}",
        ),
        ("scenes/poly_nl", "there is no recipe scenes/poly_nl. Use: scenes --model.block poly_nl\n"),
        ("recipes/scenes/none.yaml", "Use: scenes --model.block none\n"),
        ("scenes/non_local", "Use: scenes --model.block non_local\n"),
        ("imagenet/resnet50_tesa", "Use: imagenet --model.block tesa\n"),
        (
            "coco/resnet50_poly_nl_res345.yaml",
            "Use: coco --model.block poly_nl --model.placement res345\n",
        ),
        ("scenes/chess", "Use: scenes --model.block NAME\n"),
        ("mine", "mine is a folder. Recipes in it: own.yaml."),
        ("void", "void is a folder. There is no recipe in it."),
        (".", ". is a folder."),
        ("", ". is a folder."),
        ("/", "/ is a folder."),
        ("void/..", "void/.. is a folder."),
    ],
)
def test_a_path_that_is_no_recipe(command: str, path: str, expected: str, capsys: Any, here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "own.yaml").write_text(GOOD)
    (here / "void").mkdir()
    checkpoint = ["--checkpoint", "some.pt"] if command == "evaluate" else []
    assert expected in refused(capsys, here, command, path, *checkpoint)


@pytest.mark.parametrize("option", ["--epochs", "--out", "--list-keys"])
def test_the_recipe_comes_first(option: str, capsys: Any, here: Path) -> None:
    err = refused(capsys, here, "train", option, "3", TINY)
    assert f"the recipe must come first, not {option}: polynl train RECIPE [--key value …]" in err


def test_resume_and_overwrite_exclude_each_other(capsys: Any, here: Path) -> None:
    assert "choose one of them" in refused(capsys, here, "train", TINY, "--resume", "--overwrite")


@pytest.mark.parametrize(("out", "expected"), [("taken", "File exists"), ("taken/below", "Not a directory")])
def test_a_folder_that_cannot_be_made(out: str, expected: str, capsys: Any, here: Path) -> None:
    (here / "taken").write_text("a file")
    err = refused(capsys, here, "train", TINY, "--out", out)
    assert f"--out: {out} cannot be used as a folder: {expected}" in err


def test_a_batch_that_cannot_be_shared_evenly() -> None:
    recipe = parse_recipe(
        {"task": "classification", "epochs": 1, "batch": 6, "data": {"source": "scenes"}}, "it"
    )
    assert [recipe.total_batch(count) for count in (1, 2, 3, 6)] == [6] * 4
    with pytest.raises(ValueError, match="batch: 6 images cannot be split evenly over 4 processes"):
        recipe.total_batch(4)
