"""Folders of results, as plain data: whatever wrote them, a report sees studies and benchmarks."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polynl.errors import SettingsError
from polynl.files import read_json
from polynl.results.benchmark import Results
from polynl.results.paper import PAPER, row_label, row_name
from polynl.train.checkpoint import BEST_WEIGHTS, LAST_WEIGHTS
from polynl.train.config import Recipe, neutral_fields
from polynl.train.recipe_file import parse_recipe, read_yaml
from polynl.train.run_folder import ENVIRONMENT, METRICS, RECIPE

# What `polynl reproduce` writes.
RESULTS, LAYERS = "results.json", "layers"
BENCHES = ("layers.json", "nets.json")
EXPECTED = (
    f"the folder of `polynl reproduce` ({RESULTS}), of `polynl train` ({RECIPE} and {METRICS}.json) "
    f"or of `polynl bench` ({' or '.join(BENCHES)})"
)
COSTS = ("parameters", "multiply_adds", "forward_seconds", "training_seconds")
# Of folders in a title.
NAMES = 4


@dataclass(frozen=True)
class Training:
    """One training: its folder, its seed, a row of figures for each epoch."""

    folder: Path
    seed: int
    rows: Sequence[Mapping[str, Any]]

    def last(self, score: str) -> float | None:
        """A score when it was last computed."""
        return next((value for _, value in reversed(self.along_epochs(score))), None)

    def along_epochs(self, score: str) -> list[tuple[int, float]]:
        """(epoch, the score) wherever it was computed and is a number."""
        return [
            (int(row["epoch"]), float(row[score]))
            for row in self.rows
            if isinstance(row.get(score), int | float) and math.isfinite(row[score])
        ]

    def weights(self) -> Path | None:
        """The file of the best epoch, or of the last."""
        files = (self.folder / name for name in (BEST_WEIGHTS, LAST_WEIGHTS))
        return next((file for file in files if file.is_file()), None)


@dataclass(frozen=True)
class Variant:
    """Trainings that differ in their seed only."""

    row: str
    label: str
    recipe: Mapping[str, Any]
    trainings: Sequence[Training]
    costs: Mapping[str, float] = field(default_factory=dict)
    """Those of `COSTS` that were measured."""

    @property
    def block(self) -> str:
        """The block's name; "none" without one."""
        return self.row.partition("@")[0]

    def last(self, score: str) -> list[float]:
        """A score of every training that has it."""
        return [value for training in self.trainings if (value := training.last(score)) is not None]

    def along_epochs(self, score: str) -> list[tuple[int, list[float]]]:
        """(epoch, the score of every training that got there)."""
        found: dict[int, list[float]] = {}
        for training in self.trainings:
            for epoch, value in training.along_epochs(score):
                found.setdefault(epoch, []).append(value)
        return sorted(found.items())

    @property
    def seconds(self) -> float:
        """Of training, the mean over seeds."""
        return statistics.mean(sum(row["seconds"] for row in t.rows) for t in self.trainings)


@dataclass(frozen=True)
class Study:
    """Variants of one task that are shown in one table."""

    title: str
    task: str
    variants: Sequence[Variant]
    note: str = ""
    folders: Sequence[Path] = ()
    """As given."""

    def scores(self) -> dict[str, str]:
        """The task's scores that were computed, with their headings."""
        headings = PAPER[self.task].headings
        return {s: text for s, text in headings.items() if any(v.last(s) for v in self.variants)}


@dataclass(frozen=True)
class Origin:
    """What was typed where."""

    what: str
    command: str
    environment: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.command, str):
            raise TypeError(f"command={self.command!r}: expected a string")
        if not isinstance(self.environment, dict):
            raise TypeError(f"environment={self.environment!r}: expected an object")
        if not isinstance(variables := self.environment.get("variables", {}), dict):
            raise TypeError(f"variables={variables!r}: expected an object")


@dataclass
class Gathered:
    """Everything in the folders."""

    studies: list[Study] = field(default_factory=list)
    benches: list[tuple[str, Results]] = field(default_factory=list)
    """(the folder as given, the benchmark)."""
    origins: list[Origin] = field(default_factory=list)


def gathered(folders: Sequence[Path]) -> Gathered:
    """What the folders hold; a SettingsError for one that holds no results."""
    found, trained = Gathered(), []
    for folder in {folder.resolve(): folder for folder in folders}.values():
        kinds = list(_kinds(folder))
        if not kinds:
            raise SettingsError(f"{folder}: {_wrong_with(folder)}; expected {EXPECTED}.")
        for kind in kinds:
            if kind == RESULTS:
                _add_reproduction(found, folder)
            elif kind == RECIPE:
                trained.append(_training(found, folder))
            else:
                _add_bench(found, folder / kind, str(folder))
    found.studies += _studies(trained)
    found.studies = _told_apart(found.studies)
    return found


def few(names: Sequence[object]) -> str:
    """All of a few, or the first and how many there are more."""
    if len(names) <= NAMES:
        return ", ".join(map(str, names))
    return f"{', '.join(map(str, names[: NAMES - 1]))} and {len(names) - NAMES + 1} more"


@contextmanager
def _reading(file: Path, wrong: str, remedy: str = "") -> Iterator[None]:
    """A SettingsError in place of what is raised where a file holds something else than expected."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise SettingsError(f"{file} {wrong}: {error!r}{remedy}.") from None


def _kinds(folder: Path) -> Iterator[str]:
    """The file of each kind of results in the folder."""
    if (folder / RESULTS).is_file():
        yield RESULTS
    if (folder / RECIPE).is_file() and (folder / f"{METRICS}.json").is_file():
        yield RECIPE
    yield from (name for name in BENCHES if (folder / name).is_file())


def _wrong_with(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "this is a file"
    if (folder / RECIPE).is_file():
        return f"a training that has not finished an epoch yet, with no {METRICS}.json"
    return "no results of polynl are in it"


def _add_reproduction(found: Gathered, folder: Path) -> None:
    content = read_json(folder / RESULTS)
    remedy = "; make it again by `polynl reproduce --resume`"
    with _reading(folder / RESULTS, "is not of this version of polynl", remedy):
        variants = [_outcome(folder, outcome, content["recipe"]) for outcome in content["outcomes"]]
        recipe, quick = content["recipe"], content["quick"]
        title, task = _title([recipe]), recipe["task"]
        if task not in PAPER:
            raise ValueError(f"task={task!r}: expected one of {', '.join(PAPER)}")
        if not variants:
            raise ValueError("there are no outcomes")
        found.origins.append(Origin("polynl reproduce", content["command"], content["environment"]))
    note = (
        "Made with --quick: there was no time to learn, and these accuracies mean nothing." if quick else ""
    )
    found.studies.append(Study(title, task, variants, note, [folder]))
    if (folder / LAYERS / BENCHES[0]).is_file():
        _add_bench(found, folder / LAYERS / BENCHES[0], str(folder / LAYERS))


def _outcome(folder: Path, outcome: Mapping[str, Any], recipe: Mapping[str, Any]) -> Variant:
    block = outcome["block"]
    row = row_name(block, recipe["model"]["placement"])
    trainings = [
        Training(folder / f"{block}-seed{seed}", int(seed), _epochs(rows))
        for seed, rows in outcome["epochs"].items()
    ]
    if not trainings or not all(training.rows for training in trainings):
        raise ValueError(f"a training of {block} has no epoch")
    costs = {name: float(outcome[name]) for name in COSTS}
    if not all(0 < cost < math.inf for cost in costs.values()):
        raise ValueError(f"costs of {block}: {costs}")
    return Variant(row, row_label(row), recipe, trainings, costs)


def _add_bench(found: Gathered, file: Path, name: str) -> None:
    results = Results.load(file)
    found.benches.append((name, results))
    with _reading(file, "is not the JSON of a benchmark"):
        found.origins.append(Origin(f"polynl bench {results.kind}", results.command, results.environment))


Trained = tuple[dict[str, Any], Training]


def _training(found: Gathered, folder: Path) -> Trained:
    """The recipe of a run, and the run."""
    file = folder / RECIPE
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    recipe = parse_recipe(content, str(file))
    file = folder / f"{METRICS}.json"
    figures = read_json(file)
    with _reading(file, "has no rows of figures as `polynl train` writes"):
        rows = _epochs(figures)
    if not rows:
        raise SettingsError(f"{file}: no epoch of the training has finished yet; report it later.")
    file = folder / ENVIRONMENT
    if file.is_file():
        environment = read_json(file)
        with _reading(file, "has no environment as `polynl train` writes it"):
            command = environment.pop("command", "polynl train")
            found.origins.append(Origin(str(folder), command, environment))
    return recipe.model_dump(mode="json"), Training(folder, recipe.seed, rows)


def _epochs(rows: Any) -> list[dict[str, Any]]:
    """The rows, each with its epoch and the seconds that it took."""
    if not isinstance(rows, list):
        raise TypeError(f"expected a list, got {type(rows).__name__}")
    return [{**row, "epoch": int(row["epoch"]), "seconds": float(row["seconds"])} for row in rows]


def _studies(trained: Sequence[Trained]) -> Iterator[Study]:
    """A study for each task, network and data, since no others can be compared."""
    for task in PAPER:
        compared = _groups([entry for entry in trained if entry[0]["task"] == task], _compared)
        for alike in compared:
            variants = _labelled([_variant(group) for group in _groups(alike, _learns)])
            folders = [training.folder for _, training in alike]
            yield Study(_title([v.recipe for v in variants]), task, variants, folders=folders)


def _told_apart(studies: Sequence[Study]) -> list[Study]:
    """Those of one title by their folders: a title does not say all that keeps them apart."""
    titles = [study.title for study in studies]
    return [
        s if titles.count(s.title) == 1 else replace(s, title=f"{s.title}: {few(s.folders)}") for s in studies
    ]


def _learns(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What the trainings of one variant share: all but the seed, and what only changes how fast they are."""
    left_out = {"seed", *neutral_fields(Recipe)}
    return {key: value for key, value in recipe.items() if key not in left_out}


def _compared(recipe: Mapping[str, Any]) -> list[Any]:
    """What a study's trainings share: the network that blocks are put into, and the images."""
    return [recipe["model"]["arch"], recipe["model"]["arch_options"], recipe["data"]]


def _groups(trained: Sequence[Trained], key: Callable[[dict[str, Any]], Any]) -> list[list[Trained]]:
    """Those with equal keys together, in the order in which they come."""
    groups: dict[str, list[Trained]] = {}
    for recipe, training in trained:
        groups.setdefault(json.dumps(key(recipe), sort_keys=True), []).append((recipe, training))
    return list(groups.values())


def _variant(group: Sequence[Trained]) -> Variant:
    recipe = group[0][0]
    row = row_name(recipe["model"]["block"] or "none", recipe["model"]["placement"])
    return Variant(row, row_label(row), recipe, [training for _, training in group])


def _labelled(variants: Sequence[Variant]) -> list[Variant]:
    """In the paper's order, and told apart by their folders where the block does not."""
    order = list(dict.fromkeys(row for table in PAPER.values() for row in table.rows))
    found = sorted(variants, key=lambda v: order.index(v.row) if v.row in order else len(order))
    rows = [variant.row for variant in found]
    return [
        v if rows.count(v.row) == 1 else Variant(v.row, f"{v.label}, {_folders(v)}", v.recipe, v.trainings)
        for v in found
    ]


def _folders(variant: Variant) -> str:
    return ", ".join(str(training.folder) for training in variant.trainings)


def _title(recipes: Sequence[Mapping[str, Any]]) -> str:
    """What is compared: network, data, epochs."""
    epochs = sorted({recipe["epochs"] for recipe in recipes})
    counted_epochs = f"{' or '.join(map(str, epochs))} {'epoch' if epochs == [1] else 'epochs'}"
    return f"{_network(recipes[0])} on {_data(recipes[0])}, {counted_epochs}"


def _network(recipe: Mapping[str, Any]) -> str:
    name = recipe["model"]["arch"]
    arch = "small ResNet" if name == "small_resnet" else re.sub(r"^resnet(\d+)$", r"ResNet-\1", name)
    return {"instance_segmentation": f"Mask R-CNN, {arch},", "face_detection": f"Face detector, {arch},"}.get(
        recipe["task"], arch[0].upper() + arch[1:]
    )


def _data(recipe: Mapping[str, Any]) -> str:
    data = recipe["data"]
    return Path(data["root"]).name if data.get("root") else str(data["source"])
