"""Folders of results: what each kind holds, how trainings belong together, and what is said of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finished_runs import layers, networks, outcome, reproduced, row, written

from polynl.errors import SettingsError
from polynl.report.load import load_runs
from polynl.report.pictures import weights_file

ROWS = [row(1, top1=10.0, top5=60.0), row(2, top1=20.0, top5=70.0)]


def test_a_training(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", ROWS, "--seed", "3")
    found = load_runs([folder])
    (study,) = found.studies
    assert (study.title, study.task) == ("Small ResNet on easy scenes, 2 epochs", "classification")
    assert not study.note
    (variant,) = study.variants
    assert (variant.row, variant.block, variant.label, variant.costs) == (
        "poly_nl",
        "poly_nl",
        "Poly-NL",
        None,
    )
    assert variant.seconds == 60.0
    (training,) = variant.trainings
    assert (training.folder, training.seed) == (folder, 3)
    assert variant.history("top1") == [(1, [10.0]), (2, [20.0])]
    assert (variant.last("top5"), variant.last("box_ap")) == ([70.0], [])
    (origin,) = found.origins
    assert (origin.what, origin.command) == (str(folder), "polynl train tiny --out a")
    assert "command" not in origin.environment
    assert not found.benchmarks


def test_the_best_weights_come_first(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", ROWS)
    training = load_runs([folder]).studies[0].variants[0].trainings[0]
    assert weights_file(training) is None
    for name in ("last.safetensors", "best.safetensors"):
        (folder / name).write_bytes(b"")
        assert weights_file(training) == folder / name


def test_a_score_is_that_of_the_last_epoch_that_was_scored(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", [*ROWS, row(3)])
    variant = load_runs([folder]).studies[0].variants[0]
    assert variant.last("top1") == [20.0]
    assert variant.history("loss") == [(1, [2.0]), (2, [1.0]), (3, [0.0])]


def test_seeds_are_one_variant_however_fast_they_were(tmp_path: Path) -> None:
    folders = [
        written(
            tmp_path / f"seed{seed}",
            [row(1, top1=float(seed))],
            "--seed",
            f"{seed}",
            "--threads",
            f"{seed + 1}",
        )
        for seed in (0, 1)
    ]
    (study,) = load_runs(folders).studies
    (variant,) = study.variants
    assert [training.seed for training in variant.trainings] == [0, 1]
    assert variant.last("top1") == [0.0, 1.0]
    assert variant.history("top1") == [(1, [0.0, 1.0])]


def test_two_trainings_with_one_seed_are_not_counted_twice(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, ROWS, "--seed", "4") for name in ("one", "two")]
    with pytest.raises(SettingsError) as said:
        load_runs(folders)
    assert str(said.value) == (
        f"{folders[0]} and {folders[1]} are of one recipe and one seed, 4: report one of them."
    )


def test_other_recipes_are_other_variants_named_by_their_folders(tmp_path: Path) -> None:
    one = written(tmp_path / "one", ROWS)
    two = written(tmp_path / "two", ROWS, "--optimizer.lr", "0.5", "--epochs", "7")
    plain = written(tmp_path / "plain", ROWS, "--model.block", "none")
    (study,) = load_runs([one, two, plain]).studies
    assert study.title == "Small ResNet on easy scenes, 2 or 7 epochs"
    assert [variant.label for variant in study.variants] == ["no block", f"Poly-NL, {one}", f"Poly-NL, {two}"]
    assert study.unequal == ["epochs", "optimizer.lr"]
    assert load_runs([one, plain]).studies[0].unequal == []


def test_a_block_is_compared_with_the_network_of_its_own_recipe(tmp_path: Path) -> None:
    long = ("--epochs", "7")
    folders = [
        written(tmp_path / "long", ROWS, "--model.block", "none", *long),
        written(tmp_path / "plain", ROWS, "--model.block", "none"),
        written(tmp_path / "block", ROWS, "--model.placement", "res3"),
    ]
    first, second = load_runs(folders).studies
    assert [study.folders for study in (first, second)] == [folders[:1], folders[1:]]
    assert first.title == "Small ResNet on easy scenes, 7 epochs"
    assert [base.label for base in second.bases()] == ["no block"]
    (together,) = load_runs(folders[1:]).studies
    assert not together.unequal
    (unequal,) = load_runs([folders[0], folders[2]]).studies
    assert unequal.unequal == ["epochs"], "there is nothing better to compare with"


def test_the_papers_order(tmp_path: Path) -> None:
    blocks = ("poly_nl", "polynomial", "tesa", "none", "non_local")
    folders = [written(tmp_path / block, ROWS, "--model.block", block) for block in blocks]
    (study,) = load_runs(folders).studies
    rows = [variant.row for variant in study.variants]
    assert rows == ["none", "non_local", "tesa", "poly_nl", "polynomial"]


def test_what_cannot_be_compared_is_another_study(tmp_path: Path) -> None:
    (tmp_path / "birds" / "val").mkdir(parents=True)
    data = ("--data", f"{{source: image_folder, root: {tmp_path / 'birds'}}}")
    folders = [
        written(tmp_path / "faces", ROWS, task="face_detection"),
        written(tmp_path / "masks", ROWS, task="instance_segmentation"),
        written(tmp_path / "scenes", ROWS),
        written(tmp_path / "photos", ROWS, *data),
        written(tmp_path / "large", ROWS, "--model", "{arch: resnet18, block: none}"),
    ]
    assert [study.title for study in load_runs(folders).studies] == [
        "Small ResNet on easy scenes, 2 epochs",
        "Small ResNet on birds, 2 epochs",
        "ResNet-18 on easy scenes, 2 epochs",
        "Mask R-CNN, small ResNet, on easy scenes, 2 epochs",
        "Face detector, small ResNet, on scenes, 2 epochs",
    ]


SMALL = {"arch": "small_resnet", "arch_options": {"width": 4}}
SCENES = {"source": "scenes"}
IMAGES = {"source": "image_folder", "root": "data"}
COCO = {"source": "coco", "root": "data"}
FACES = {"source": "wider_face", "root": "data"}


@pytest.mark.parametrize(
    ("task", "part", "content", "change"),
    [
        ("classification", "model", {"arch": "resnet18"}, {"arch": "resnet34"}),
        ("classification", "model", SMALL, {"arch_options": {"width": 8}}),
        ("classification", "data", SCENES, {"size": 24}),
        ("classification", "data", SCENES, {"difficulty": "hard"}),
        ("classification", "data", SCENES, {"val_images": 12}),
        ("classification", "data", SCENES, {"seed": 1}),
        ("classification", "data", IMAGES, {"root": "more/data"}),
        ("classification", "data", IMAGES, {"val": "test"}),
        ("instance_segmentation", "data", COCO, {"categories": ["cat"]}),
        ("face_detection", "data", FACES, {"ground_truth": "truth"}),
    ],
)
def test_another_network_or_other_images_are_another_study(
    task: str, part: str, content: dict[str, object], change: dict[str, object], tmp_path: Path
) -> None:
    """Also where nothing else is different, and the block is the same."""
    folders = [
        written(tmp_path / name, ROWS, f"--{part}", json.dumps(given), task=task)
        for name, given in (("a", content), ("b", content | change))
    ]
    first, second = load_runs(folders).studies
    assert [len(study.variants) for study in (first, second)] == [1, 1]
    assert first.title != second.title


def test_the_order_of_options_is_no_difference(tmp_path: Path) -> None:
    options = ("{depth: 1, width: 8}", "{width: 8, depth: 1}")
    folders = [
        written(tmp_path / f"{place}", ROWS, "--model.arch-options", given, "--seed", f"{place}")
        for place, given in enumerate(options)
    ]
    (study,) = load_runs(folders).studies
    (variant,) = study.variants
    assert [training.seed for training in variant.trainings] == [0, 1]


def test_studies_of_one_title_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    small = [written(tmp_path / f"small{seed}", ROWS, "--seed", f"{seed}") for seed in range(5)]
    large = written(tmp_path / "large", ROWS, "--data.size", "24")
    longer = written(tmp_path / "longer", ROWS, "--epochs", "3", "--data.size", "24", "--data.seed", "1")
    results = reproduced(tmp_path / "results", [outcome("none", ROWS), outcome("tesa", ROWS)])
    assert [study.title for study in load_runs([*small, large, longer, results]).studies] == [
        f"Small ResNet on easy scenes, 2 epochs: {results}",
        f"Small ResNet on easy scenes, 2 epochs: {small[0]}, {small[1]}, {small[2]} and 2 more",
        f"Small ResNet on easy scenes, 2 epochs: {large}",
        "Small ResNet on easy scenes, 3 epochs",
    ]


def test_a_reproduction(tmp_path: Path) -> None:
    outcomes = [outcome("none", ROWS, ROWS), outcome("tesa", ROWS, ROWS, forward_seconds=3.0)]
    folder = reproduced(tmp_path / "results", outcomes, quick=True)
    layers().save(folder / "layers" / "layers.json")
    found = load_runs([folder])
    (study,) = found.studies
    assert "--quick" in study.note
    assert [variant.row for variant in study.variants] == ["none", "tesa"]
    assert study.variants[1].costs.forward_seconds == 3.0
    folders = [training.folder.name for training in study.variants[1].trainings]
    assert folders == ["tesa-seed0", "tesa-seed1"]
    assert [(name, results.kind) for name, results in found.benchmarks] == [
        (str(folder / "layers"), "layers")
    ]
    assert [origin.what for origin in found.origins] == ["polynl reproduce", "polynl bench layers"]
    assert not load_runs([reproduced(tmp_path / "long", outcomes)]).studies[0].note


def test_benchmarks(tmp_path: Path) -> None:
    layers().save(tmp_path / "layers.json")
    networks().save(tmp_path / "nets.json")
    found = load_runs([tmp_path])
    assert [(name, results.kind) for name, results in found.benchmarks] == [
        (str(tmp_path), "layers"),
        (str(tmp_path), "nets"),
    ]
    assert [origin.command for origin in found.origins] == ["polynl bench layers", "polynl bench nets"]


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", ROWS)
    (study,) = load_runs([folder, tmp_path / "a" / ".." / "a"]).studies
    assert len(study.variants[0].trainings) == 1


def damaged(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder


def test_folders_without_results(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    begun = written(tmp_path / "begun", ROWS)
    (begun / "metrics.json").unlink()
    for name, message in (
        ("nowhere", "there is no such folder"),
        ("file", "this is a file"),
        ("empty", "it contains no results of polynl"),
        ("begun", "a training that has not finished an epoch yet, without metrics.json"),
    ):
        with pytest.raises(SettingsError) as caught:
            load_runs([tmp_path / name])
        said = str(caught.value)
        assert said.startswith(f"{tmp_path / name}: {message}; expected the folder of `polynl reproduce`")
        assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.json", "[]", "no epoch of the training has finished yet"),
        ("metrics.json", "[{", "is not valid JSON, or is truncated"),
        ("metrics.json", '[{"loss": 1}]', "KeyError('epoch')"),
        ("metrics.json", "[1]", "TypeError"),
        ("metrics.json", "{}", "expected a list, got dict"),
        (
            "metrics.json",
            '[{"epoch": NaN, "seconds": 1}]',
            "does not have the rows that `polynl train` writes",
        ),
        (
            "metrics.json",
            '[{"epoch": Infinity, "seconds": 1}]',
            "does not have the rows that `polynl train` writes",
        ),
        (
            "metrics.json",
            '[{"epoch": "x", "seconds": 1}]',
            "does not have the rows that `polynl train` writes",
        ),
        ("recipe.yaml", "a: [", "cannot be read: line 1"),
        ("recipe.yaml", "task: chess", "task must be one of"),
        ("environment.json", "{", "is not valid JSON, or is truncated"),
        ("environment.json", "[]", "does not have the environment that `polynl train` writes"),
        ("environment.json", "3", "does not have the environment that `polynl train` writes"),
        ("environment.json", '{"variables": 3}', "variables=3: expected an object"),
        ("environment.json", '{"command": [1]}', "command=[1]: expected a string"),
        ("results.json", "{", "is not valid JSON, or is truncated"),
        ("results.json", "[]", "is not of this version of polynl"),
        (
            "results.json",
            '{"recipe": {}, "outcomes": []}',
            "is not of this version of polynl: KeyError('quick')",
        ),
        ("layers.json", "{", "is not valid JSON, or is truncated"),
        ("layers.json", '{"schema": 7}', "has schema 7"),
    ],
)
def test_damaged_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    folder = damaged(written(tmp_path / "a", ROWS), name, text)
    with pytest.raises(SettingsError) as caught:
        load_runs([folder])
    assert str(folder / name) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["block", "epochs", "forward_seconds"])
def test_results_of_another_version(missing: str, tmp_path: Path) -> None:
    folder = reproduced(tmp_path / "results", [outcome("none", ROWS)])
    content = json.loads((folder / "results.json").read_text())
    del content["outcomes"][0][missing]
    damaged(folder, "results.json", json.dumps(content))
    with pytest.raises(SettingsError) as caught:
        load_runs([folder])
    said = str(caught.value)
    assert f"is not of this version of polynl: KeyError('{missing}')" in said
    assert "`polynl reproduce --resume`" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["environment"], None, "environment=None: expected an object"),
        (["command"], [1], "command=[1]: expected a string"),
        (["recipe", "task"], "foo", "task must be one of classification, "),
        (["recipe", "model", "arch"], "", "IndexError"),
        (["outcomes"], {}, "there are no outcomes"),
        (["outcomes", 0, "epochs"], {}, "a training of none has no epoch"),
        (["outcomes", 0, "epochs", "0"], [], "a training of none has no epoch"),
        (["outcomes", 0, "epochs", "0"], {}, "expected a list, got dict"),
        (["outcomes", 0, "forward_seconds"], 0, "'forward_seconds': 0.0"),
        (["outcomes", 0, "forward_seconds"], -1, "'forward_seconds': -1.0"),
        (["outcomes", 0, "training_seconds"], float("nan"), "'training_seconds': nan"),
        (["outcomes", 0, "parameters"], float("inf"), "'parameters': inf"),
        (["outcomes", 0, "parameters"], 10**400, "OverflowError"),
    ],
)
def test_damaged_results(keys: list[str | int], value: object, message: str, tmp_path: Path) -> None:
    folder = reproduced(tmp_path / "results", [outcome("none", ROWS)])
    content = inner = json.loads((folder / "results.json").read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    damaged(folder, "results.json", json.dumps(content))
    with pytest.raises(SettingsError) as caught:
        load_runs([folder])
    said = str(caught.value)
    assert said.startswith(f"{folder / 'results.json'} is not of this version of polynl: ")
    assert message in said
    assert "\n" not in said


def test_a_benchmark_of_no_machine(tmp_path: Path) -> None:
    results = layers()
    results.environment = {"variables": 3}
    results.save(tmp_path / "layers.json")
    with pytest.raises(
        SettingsError, match=r"is not the JSON of a benchmark: environment\.variables"
    ) as caught:
        load_runs([tmp_path])
    assert str(tmp_path / "layers.json") in str(caught.value)
