"""Load the folders of runs: `polynl train`, `polynl bench` and `polynl reproduce`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.errors import SettingsError, shortened
from polynl.files import read_json
from polynl.results.benchmark import Results
from polynl.results.study import (
    Origin,
    Study,
    Training,
    Variant,
    damage_named,
    epoch_rows,
    load_study,
    study_title,
    variant_of,
)
from polynl.tasks.registry import TASKS
from polynl.train.config import Recipe, neutral_fields
from polynl.train.recipe_file import parse_recipe, read_yaml
from polynl.train.run_folder import ENVIRONMENT, METRICS, RECIPE

# What `polynl reproduce` and `polynl bench` write.
STUDY, LAYERS = "results.json", "layers"
BENCHMARKS = ("layers.json", "nets.json")
EXPECTED = (
    f"the folder of `polynl reproduce` ({STUDY}), of `polynl train` ({RECIPE} and {METRICS}.json) "
    f"or of `polynl bench` ({' or '.join(BENCHMARKS)})"
)


@dataclass
class LoadedRuns:
    """The results of runs, which a report shows."""

    studies: list[Study] = field(default_factory=list)
    benchmarks: list[tuple[str, Results]] = field(default_factory=list)
    """(the folder's name, the benchmark)."""
    origins: list[Origin] = field(default_factory=list)

    def add_benchmark(self, name: str, results: Results) -> None:
        """Add a benchmark and its origin."""
        self.benchmarks.append((name, results))
        self.origins.append(Origin(f"polynl bench {results.kind}", results.command, results.environment))


def load_runs(folders: Sequence[Path]) -> LoadedRuns:
    """The results in the folders; a folder without results raises a SettingsError."""
    runs, trainings = LoadedRuns(), []
    for folder in {folder.resolve(): folder for folder in folders}.values():
        files = list(_result_files(folder))
        if not files:
            raise SettingsError(f"{folder}: {_problem(folder)}; expected {EXPECTED}.")
        for name in files:
            if name == STUDY:
                study, origin = load_study(folder / STUDY)
                runs.studies.append(study)
                runs.origins.append(origin)
                if (folder / LAYERS / BENCHMARKS[0]).is_file():
                    _load_benchmark(runs, folder / LAYERS / BENCHMARKS[0])
            elif name == RECIPE:
                trainings.append(_load_training(folder))
                runs.origins += _training_origin(folder)
            else:
                _load_benchmark(runs, folder / name)
    runs.studies = _with_distinct_titles([*runs.studies, *_studies(trainings)])
    return runs


def _result_files(folder: Path) -> Iterator[str]:
    """The main file of each kind of results in the folder."""
    if (folder / STUDY).is_file():
        yield STUDY
    if (folder / RECIPE).is_file() and (folder / f"{METRICS}.json").is_file():
        yield RECIPE
    yield from (name for name in BENCHMARKS if (folder / name).is_file())


def _problem(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "this is a file"
    if (folder / RECIPE).is_file():
        return f"a training that has not finished an epoch yet, without {METRICS}.json"
    return "it contains no results of polynl"


def _load_benchmark(runs: LoadedRuns, file: Path) -> None:
    results = Results.load(file)
    with damage_named(file, "is not the JSON of a benchmark"):
        runs.add_benchmark(str(file.parent), results)


def _load_training(folder: Path) -> Training:
    file = folder / RECIPE
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    recipe = parse_recipe(content, str(file))
    file = folder / f"{METRICS}.json"
    metrics = read_json(file)
    with damage_named(file, "does not have the rows that `polynl train` writes"):
        rows = epoch_rows(metrics)
    if not rows:
        raise SettingsError(f"{file}: no epoch of the training has finished yet; try again later.")
    return Training(folder, recipe.model_dump(mode="json"), recipe.seed, rows)


def _training_origin(folder: Path) -> Iterator[Origin]:
    file = folder / ENVIRONMENT
    if file.is_file():
        environment = read_json(file)
        with damage_named(file, "does not have the environment that `polynl train` writes"):
            yield Origin(str(folder), environment.pop("command", "polynl train"), environment)


# Trainings that belong together


def _studies(trainings: Sequence[Training]) -> Iterator[Study]:
    """A study per task, network and data: only those can be compared."""
    for task in TASKS:
        of_task = [training for training in trainings if training.recipe["task"] == task]
        for group in _grouped(of_task, _comparable):
            variants = [variant_of(seeds) for seeds in _grouped(group, _without_seed)]
            title = study_title([variant.recipe for variant in variants])
            folders = [training.folder for training in group]
            yield Study(title, task, _with_distinct_labels(sorted(variants, key=_order)), folders)


def _comparable(recipe: Mapping[str, Any]) -> list[Any]:
    """What the trainings of a study share: the network to insert blocks into, and the images."""
    return [recipe["model"]["arch"], recipe["model"]["arch_options"], recipe["data"]]


def _without_seed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What the trainings of a variant share: everything but the seed and keys that only change the speed."""
    left_out = {"seed", *neutral_fields(Recipe)}
    return {key: value for key, value in recipe.items() if key not in left_out}


def _grouped(trainings: Sequence[Training], key: Callable[[Mapping[str, Any]], Any]) -> list[list[Training]]:
    """Trainings with equal keys together, in the order of their first."""
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        groups.setdefault(json.dumps(key(training.recipe), sort_keys=True), []).append(training)
    return list(groups.values())


def _order(variant: Variant) -> tuple[int, bool]:
    """The registry's order; the network without a block comes first, a block's other placements after it."""
    order = [NO_BLOCK, *BLOCKS]
    place = order.index(variant.block) if variant.block in order else len(order)
    return place, variant.row != variant.block


def _with_distinct_labels(variants: Sequence[Variant]) -> list[Variant]:
    """Variants of one label, told apart by their folders."""
    labels = [variant.label for variant in variants]
    return [
        v
        if labels.count(v.label) == 1
        else replace(v, label=f"{v.label}, {', '.join(str(t.folder) for t in v.trainings)}")
        for v in variants
    ]


def _with_distinct_titles(studies: Sequence[Study]) -> list[Study]:
    """Studies of one title, told apart by their folders."""
    titles = [study.title for study in studies]
    return [
        s if titles.count(s.title) == 1 else replace(s, title=f"{s.title}: {shortened(s.folders)}")
        for s in studies
    ]
