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
    METRICS_WRONG,
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
from polynl.train.recipe_file import parse_recipe, read_yaml, runs_in
from polynl.train.run_folder import ENVIRONMENT, METRICS, RECIPE, unequal_training

# What `polynl reproduce` and `polynl bench` write.
STUDY, LAYERS = "results.json", "layers"
BENCHMARKS = ("layers.json", "nets.json")
# The keys of a model in which trainings differ that are compared.
ABOUT_THE_BLOCK = ("block", "options", "placement")
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
    unrecorded: list[Path] = field(default_factory=list)
    """The folders of trainings without an origin."""

    def add_benchmark(self, name: str, results: Results) -> None:
        """Add a benchmark and its origin."""
        self.benchmarks.append((name, results))
        self.origins.append(Origin(f"polynl bench {results.kind}", results.command, results.environment))


def load_runs(folders: Sequence[Path]) -> LoadedRuns:
    """The results in the folders; a folder without results raises a SettingsError."""
    runs, trainings = LoadedRuns(), []
    for folder in {folder.resolve(): folder for folder in folders}.values():
        benchmarks = [folder / name for name in BENCHMARKS]
        has_study = (folder / STUDY).is_file()
        has_training = (folder / RECIPE).is_file() and (folder / f"{METRICS}.json").is_file()
        if has_study:
            study, origin = load_study(folder / STUDY)
            runs.studies.append(study)
            runs.origins.append(origin)
            benchmarks.insert(0, folder / LAYERS / BENCHMARKS[0])
        if has_training:
            trainings.append(_load_training(folder))
            if (folder / ENVIRONMENT).is_file():
                runs.origins.append(_training_origin(folder))
            else:
                runs.unrecorded.append(folder)
        found = [file for file in benchmarks if file.is_file()]
        for file in found:
            runs.add_benchmark(str(file.parent), Results.load(file))
        if not (has_study or has_training or found):
            raise SettingsError(f"{folder}: {_problem(folder)}; expected {EXPECTED}.{runs_in(folder)}")
    studies = [*runs.studies, *_studies(trainings)]
    titles = [study.title for study in studies]
    runs.studies = [
        s if titles.count(s.title) == 1 else replace(s, title=f"{s.title}: {shortened(s.folders)}")
        for s in studies
    ]
    return runs


def _problem(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "this is a file"
    if (folder / RECIPE).is_file():
        return f"a training that has not finished an epoch yet, without {METRICS}.json"
    return "it contains no results of polynl"


def _load_training(folder: Path) -> Training:
    file = folder / RECIPE
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    recipe = parse_recipe(content, str(file))
    file = folder / f"{METRICS}.json"
    metrics = read_json(file)
    with damage_named(file, METRICS_WRONG):
        rows = epoch_rows(metrics)
    if not rows:
        raise SettingsError(f"{file}: no epoch of the training has finished yet; try again later.")
    return Training(folder, recipe.model_dump(mode="json"), recipe.seed, rows)


def _training_origin(folder: Path) -> Origin:
    file = folder / ENVIRONMENT
    environment = read_json(file)
    with damage_named(file, "does not have the environment that `polynl train` writes"):
        return Origin(str(folder), environment.pop("command", "polynl train"), environment)


# Trainings that belong together


def _studies(trainings: Sequence[Training]) -> Iterator[Study]:
    """A study per task, network and data: only those can be compared.

    Where several trainings have no block, each is what those of its own recipe are compared with.
    """
    neutral = {"seed", *neutral_fields(Recipe)}

    def network_and_images(recipe: Mapping[str, Any]) -> Any:
        return [recipe["model"]["arch"], recipe["model"]["arch_options"], recipe["data"]]

    def all_but_seed_and_speed(recipe: Mapping[str, Any]) -> Any:
        return {key: value for key, value in recipe.items() if key not in neutral}

    def all_but_block_and_seed(recipe: Mapping[str, Any]) -> Any:
        model = {key: value for key, value in recipe["model"].items() if key not in ABOUT_THE_BLOCK}
        return {**all_but_seed_and_speed(recipe), "model": model}

    for task in TASKS:
        of_task = [training for training in trainings if training.recipe["task"] == task]
        groups = _grouped(of_task, network_and_images)
        for group in (part for one in groups for part in _with_one_base(one, all_but_block_and_seed)):
            variants = [_variant(seeds) for seeds in _grouped(group, all_but_seed_and_speed)]
            title = study_title([variant.recipe for variant in variants])
            labels = [variant.label for variant in variants]
            variants = [
                v
                if labels.count(v.label) == 1
                else replace(v, label=f"{v.label}, {', '.join(str(t.folder) for t in v.trainings)}")
                for v in sorted(variants, key=_order)
            ]
            folders = [training.folder for training in group]
            yield Study(title, task, variants, folders, unequal=_unequal(variants))


def _variant(trainings: Sequence[Training]) -> Variant:
    """The variant of trainings that differ in their seed; two with one seed would count twice."""
    first: dict[int, Path] = {}
    for training in trainings:
        folder = first.setdefault(training.seed, training.folder)
        if folder != training.folder:
            raise SettingsError(
                f"{folder} and {training.folder} are of one recipe and one seed, {training.seed}: report "
                "one of them."
            )
    return variant_of(trainings)


def _unequal(variants: Sequence[Variant]) -> list[str]:
    """The keys, beside the block, in which some variant differs from the first."""
    recipes = [parse_recipe(dict(v.recipe), str(v.trainings[0].folder)) for v in variants]
    return list(dict.fromkeys(key for other in recipes[1:] for key in unequal_training(recipes[0], other)))


def _grouped(trainings: Sequence[Training], key: Callable[[Mapping[str, Any]], Any]) -> list[list[Training]]:
    """Trainings with equal keys together, in the order of their first."""
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        groups.setdefault(json.dumps(key(training.recipe), sort_keys=True), []).append(training)
    return list(groups.values())


def _with_one_base(group: list[Training], recipe: Callable[[Mapping[str, Any]], Any]) -> list[list[Training]]:
    """The group, or its recipes apart if several of them have a training without a block."""
    apart = _grouped(group, recipe)
    bases = [trainings for trainings in apart if any(one.row == NO_BLOCK for one in trainings)]
    return apart if len(bases) > 1 else [group]


def _order(variant: Variant) -> tuple[int, bool]:
    """The registry's order; the network without a block comes first, a block's other placements after it."""
    order = [NO_BLOCK, *BLOCKS]
    place = order.index(variant.block) if variant.block in order else len(order)
    return place, variant.row != variant.block
