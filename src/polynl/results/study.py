"""Trainings and what they are compared as: seeds make a variant, variants make a study."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from polynl.blocks.registry import BLOCKS, NO_BLOCK, NO_BLOCK_LABEL
from polynl.errors import SettingsError
from polynl.files import read_json, write_atomically
from polynl.results.evidence import Evidence, comparable, load_outcomes
from polynl.results.formats import Interval, plural
from polynl.tasks.base import PaperTable, Task
from polynl.tasks.outcomes import OUTCOMES, Outcomes
from polynl.tasks.registry import task_class

LABELS = {NO_BLOCK: NO_BLOCK_LABEL} | {name: entry.label for name, entry in BLOCKS.items()}
# Softmax attention is known by a name of its own.
LABELS["non_local(mode=embedded_gaussian, scale=inner)"] = "Non-local, softmax"
# What all others are compared with: the network without a block, and the paper's block.
BASES = (NO_BLOCK, "poly_nl")
# A row's name leaves out this placement.
PLACEMENT = "res4"
QUICK_NOTE = "Made with --quick: the networks had no time to learn, so these scores mean nothing."


def row_name(block: str, placement: str | list[str], options: Mapping[str, Any] | None = None) -> str:
    """The name of a variant's row; one without options at res4 is named as in the paper's tables.

    >>> row_name("poly_nl", "res4"), row_name("poly_nl", "res3"), row_name("none", "res3")
    ('poly_nl', 'poly_nl@res3', 'none')
    >>> row_name("poly_nl", "res4", {"reduction": 4})
    'poly_nl(reduction=4)'
    """
    if block == NO_BLOCK:
        return block
    given = ", ".join(f"{name}={value}" for name, value in (options or {}).items())
    name = f"{block}({given})" if given else block
    if placement == PLACEMENT:
        return name
    return f"{name}@{placement if isinstance(placement, str) else '+'.join(placement)}"


def row_label(row: str) -> str:
    """The row's name in tables and figures.

    >>> row_label("poly_nl"), row_label("poly_nl@res3"), row_label("none")
    ('Poly-NL', 'Poly-NL at res3', 'no block')
    >>> row_label("poly_nl(reduction=4)@res3")
    'Poly-NL (reduction=4) at res3'
    """
    name, _, placement = row.rpartition("@") if "@" in row else (row, "", "")
    block, _, options = name.partition("(")
    given = f" ({options}" if options else ""
    label = LABELS.get(name, LABELS.get(block, block) + given)
    return f"{label} at {placement}" if placement else label


@dataclass(frozen=True)
class Origin:
    """Where results come from: the command and the environment it ran in."""

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

    def __str__(self) -> str:
        """The command and the machine in one line of Markdown."""
        e = self.environment
        machine = [
            *([e["gpu"]] if "gpu" in e else []),
            *(e["cpu"], plural(e["cores"], "core"), plural(e["threads"], "thread")),
            *(f"torch {e['torch']}", f"polynl {e['polynl']}"),
        ]
        if e["commit"]:
            # A plus sign marks uncommitted changes.
            machine.append(f"commit {e['commit'][:10]}{'+' if e['commit'].endswith('+') else ''}")
        return f"`{self.command}` on {', '.join(machine)}."


@dataclass(frozen=True)
class Training:
    """One training: its folder, its recipe with all keys, its seed, and a row of scores per epoch."""

    folder: Path
    recipe: Mapping[str, Any]
    seed: int
    rows: Sequence[Mapping[str, Any]] = ()

    @property
    def row(self) -> str:
        """The name of its row in the paper's tables."""
        model = self.recipe["model"]
        return row_name(model["block"] or NO_BLOCK, model["placement"], model["options"])

    @property
    def finished(self) -> bool:
        """Whether its last epoch is done."""
        return len(self.rows) == self.recipe["epochs"]

    def last(self, score: str) -> float | None:
        """A score when it was last computed."""
        return next((value for _, value in reversed(self.history(score))), None)

    def history(self, score: str) -> list[tuple[int, float]]:
        """(epoch, score) of the epochs in which it was computed and is finite."""
        return [
            (int(row["epoch"]), float(row[score]))
            for row in self.rows
            if isinstance(row.get(score), int | float) and math.isfinite(row[score])
        ]


# What is said of a metrics file in which `epoch_rows` fails.
METRICS_WRONG = "does not have the rows that `polynl train` writes"


def epoch_rows(rows: Any) -> list[dict[str, Any]]:
    """The rows of a metrics file, checked: each has its epoch and the seconds that it took."""
    if not isinstance(rows, list):
        raise TypeError(f"expected a list, got {type(rows).__name__}")
    return [{**row, "epoch": int(row["epoch"]), "seconds": float(row["seconds"])} for row in rows]


@dataclass(frozen=True)
class Costs:
    """The costs of one network; times are medians over a batch, None if they were not measured."""

    parameters: float
    multiply_adds: float
    forward_seconds: float | None = None
    training_seconds: float | None = None


@dataclass(frozen=True)
class Variant:
    """Trainings that differ only in their seed."""

    row: str
    label: str
    trainings: Sequence[Training]
    costs: Costs | None = None

    @property
    def block(self) -> str:
        """The block's name; "none" without a block."""
        return self.recipe["model"]["block"] or NO_BLOCK

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe of the first seed."""
        return self.trainings[0].recipe

    def last(self, score: str) -> list[float]:
        """The last value of a score, for every training that has it."""
        return [value for training in self.trainings if (value := training.last(score)) is not None]

    def history(self, score: str) -> list[tuple[int, list[float]]]:
        """(epoch, the scores of all trainings that reached it)."""
        found: dict[int, list[float]] = {}
        for training in self.trainings:
            for epoch, value in training.history(score):
                found.setdefault(epoch, []).append(value)
        return sorted(found.items())

    def outcomes(self) -> dict[int, Outcomes]:
        """The outcomes on every image, by seed, of the trainings that have saved them."""
        task = task_class(self.recipe["task"])
        files = {training.seed: training.folder / OUTCOMES for training in self.trainings}
        return {seed: load_outcomes(file, task) for seed, file in files.items() if file.is_file()}

    @property
    def seconds(self) -> float:
        """The training time, averaged over seeds."""
        return statistics.mean(sum(row["seconds"] for row in t.rows) for t in self.trainings)


def variant_of(trainings: Sequence[Training], costs: Costs | None = None) -> Variant:
    """The variant of trainings that differ only in their seed."""
    return Variant(trainings[0].row, row_label(trainings[0].row), trainings, costs)


@dataclass(frozen=True)
class Study:
    """Variants of one task that are compared in one table."""

    title: str
    task: str
    variants: Sequence[Variant]
    folders: Sequence[Path] = ()
    quick: bool = False
    """Whether it was made by `polynl reproduce --quick`."""
    unequal: Sequence[str] = ()
    """Keys of the recipes, beside the block and the seed, that the variants differ in."""

    @property
    def task_class(self) -> type[Task]:
        """What the task says of its scores and of the paper."""
        return task_class(self.task)

    @property
    def note(self) -> str:
        """A warning to the reader, or nothing."""
        return QUICK_NOTE if self.quick else ""

    @property
    def about(self) -> str:
        """What the images are, what a network is to say of them, and on how many it was scored."""
        first = next((seeds for seeds in self._outcomes.values() if seeds), None)
        parts = [self.task_class.about_images(self.variants[0].recipe["data"]["source"])]
        if first is not None and not self.different_images:
            parts.append(f"Scored on {self.task_class.counted(next(iter(first.values())))}.")
        return " ".join(filter(None, parts))

    @cached_property
    def paper(self) -> PaperTable | None:
        """The paper's table, if these networks were trained and scored on its data."""
        table, images = self.task_class.paper, None if self.evidence is None else self.evidence.images
        return table if table is not None and table.covers(self.variants[0].recipe, images) else None

    def scores(self) -> dict[str, str]:
        """The scores of the task that were computed, with their headings."""
        headings = self.task_class.scores
        return {s: text for s, text in headings.items() if any(v.last(s) for v in self.variants)}

    def plain(self) -> Variant | None:
        """The network without a block, which the others are compared with."""
        return next((variant for variant in self.variants if variant.row == NO_BLOCK), None)

    def bases(self) -> list[Variant]:
        """What the others are compared with: of `BASES`, the first variant of each that there is."""
        first = {variant.row: variant for variant in reversed(self.variants)}
        return [first[row] for row in BASES if row in first]

    @cached_property
    def evidence(self) -> Evidence | None:
        """How sure the scores are, by the variants' labels; None if the trainings have saved no outcomes.

        Also None if they were scored on `different_images`.
        """
        found = {label: seeds for label, seeds in self._outcomes.items() if seeds}
        return Evidence(self.task_class, found) if found and not self.different_images else None

    @cached_property
    def different_images(self) -> str | None:
        """Which trainings were scored on different images, if some were."""
        every = [
            (f"{label} with seed {seed}", one)
            for label, seeds in self._outcomes.items()
            for seed, one in seeds.items()
        ]
        return comparable(every) if every else None

    @cached_property
    def _outcomes(self) -> dict[str, dict[int, Outcomes]]:
        return {variant.label: variant.outcomes() for variant in self.variants}

    def difference(self, variant: Variant, base: Variant, score: str) -> Interval | None:
        """A paired difference; None without the outcomes of both, or without a seed that both have."""
        evidence = self.evidence
        if evidence is None or variant is base or not evidence.common_seeds(variant.label, base.label):
            return None
        return evidence.difference(variant.label, base.label, score) if score in evidence.scores() else None

    def save(self, path: Path, origin: Origin) -> None:
        """Write what `polynl reproduce` found, for `load_study`."""
        content = {
            "command": origin.command,
            "quick": self.quick,
            "environment": origin.environment,
            "recipe": self.variants[0].recipe,
            "outcomes": [self._outcome(variant) for variant in self.variants],
        }
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def _outcome(self, variant: Variant) -> dict[str, Any]:
        assert variant.costs is not None, "only `polynl reproduce` saves studies, and it measures costs"
        return {
            "block": variant.block,
            "options": variant.recipe["model"]["options"],
            "label": variant.label,
            **{score: variant.last(score) for score in self.scores() if variant.last(score)},
            "intervals": self._intervals(variant),
            "minutes": variant.seconds / 60,
            **asdict(variant.costs),
            "paper": {} if self.paper is None else self.paper.figures(variant.row),
            "folders": {str(training.seed): training.folder.name for training in variant.trainings},
            "epochs": {str(training.seed): list(training.rows) for training in variant.trainings},
        }

    def _intervals(self, variant: Variant) -> dict[str, Any]:
        """For every score its interval, and those of its differences to the bases."""
        evidence = self.evidence
        if evidence is None or not evidence.seeds(variant.label):
            return {}
        found = {}
        for score in evidence.scores():
            found[score] = {"mean": asdict(evidence.interval(variant.label, score))}
            for base in self.bases():
                if (difference := self.difference(variant, base, score)) is not None:
                    found[score][f"minus {base.row}"] = asdict(difference)
        return found


@contextmanager
def damage_named(file: Path, wrong: str, remedy: str = "") -> Iterator[None]:
    """Turn what a file with unexpected content raises into a SettingsError that names the file."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise SettingsError(f"{file} {wrong}: {error!r}{remedy}.") from None


def load_study(path: Path) -> tuple[Study, Origin]:
    """The study that `Study.save` wrote and its origin, or a SettingsError."""
    content = read_json(path)
    remedy = "; run `polynl reproduce --resume` to write it again"
    with damage_named(path, "is not of this version of polynl", remedy):
        recipe, folder = content["recipe"], path.parent
        variants = [_load_variant(folder, outcome, recipe) for outcome in content["outcomes"]]
        quick = content["quick"]
        if not variants:
            raise ValueError("there are no outcomes")
        study = Study(study_title([recipe]), recipe["task"], variants, [folder], quick)
        return study, Origin("polynl reproduce", content["command"], content["environment"])


def _load_variant(folder: Path, outcome: Mapping[str, Any], recipe: Mapping[str, Any]) -> Variant:
    block = outcome["block"]
    model = {**recipe["model"], "block": block, "options": dict(outcome.get("options", {}))}
    folders = outcome.get("folders", {})
    trainings = [
        Training(
            folder / Path(folders.get(seed, f"{block}-seed{seed}")).name,
            {**recipe, "model": model, "seed": int(seed)},
            int(seed),
            epoch_rows(rows),
        )
        for seed, rows in outcome["epochs"].items()
    ]
    if not trainings or not all(training.rows for training in trainings):
        raise ValueError(f"a training of {block} has no epoch")
    # Without timings, the times are null.
    optional = {field.name for field in fields(Costs) if field.default is None}
    given = {field.name: outcome[field.name] for field in fields(Costs)}
    costs = {name: float(value) for name, value in given.items() if value is not None or name not in optional}
    if not all(0 < cost < math.inf for cost in costs.values()):
        raise ValueError(f"costs of {block}: {costs}")
    return variant_of(trainings, Costs(**costs))


def network_name(arch: str) -> str:
    """The name of a network as papers write it.

    >>> network_name("small_resnet"), network_name("resnet50"), network_name("resnext101_32x8d")
    ('small ResNet', 'ResNet-50', 'ResNeXt-101 32x8d')
    >>> network_name("wide_resnet50_2")
    'Wide ResNet-50-2'
    >>> network_name("timm/convnext_tiny")
    "timm's convnext_tiny"
    """
    arch = arch.replace("/", "'s ", 1)
    name = re.sub(r"resnet(\d+)", r"ResNet-\1", re.sub(r"resnext(\d+)_", r"ResNeXt-\1 ", arch))
    return re.sub(r"^wide_(.*)_", r"Wide \1-", name.replace("small_resnet", "small ResNet"))


def study_title(recipes: Sequence[Mapping[str, Any]]) -> str:
    """The network, the data and the number of epochs."""
    data = recipes[0]["data"]
    network = task_class(recipes[0]["task"]).network.format(arch=network_name(recipes[0]["model"]["arch"]))
    drawn = " ".join(filter(None, (data.get("difficulty"), data["source"])))
    images = Path(data["root"]).name if data.get("root") else drawn
    epochs = sorted({recipe["epochs"] for recipe in recipes})
    noun = "epoch" if epochs == [1] else "epochs"
    return f"{network[0].upper()}{network[1:]} on {images}, {' or '.join(map(str, epochs))} {noun}"
