"""Compare two trained networks on the images that both were scored on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from polynl.errors import SettingsError, shortened
from polynl.files import check_destination, write_atomically
from polynl.results.evidence import REPLICATES, Evidence, comparable
from polynl.results.formats import Interval, plural, signed
from polynl.results.tables import Table, as_rich
from polynl.tasks.base import Task
from polynl.tasks.registry import task_class
from polynl.train.checkpoint import BEST, BEST_WEIGHTS
from polynl.train.outcomes import Scored, find_outcomes, trained_recipe
from polynl.train.run_folder import unequal_training

# Both are one training each, so the seed under which they are compared is of no importance.
SEED = 0


@dataclass(frozen=True)
class Compared:
    """A score of both networks; `difference` is the second minus the first."""

    score: str
    first: Interval
    second: Interval
    difference: Interval


def run_compare(
    first: Path, second: Path, out: Path | None, console: Console, keys: Sequence[str] = ()
) -> list[Compared]:
    """Print the scores of both, their difference, and whether it is beyond chance.

    With `keys` of the recipe, both are scored now.
    """
    if out is not None:
        check_destination(out, "file", "--out")
    if first.resolve() == second.resolve():
        raise SettingsError(f"{first} is given twice: specify two runs.")
    if keys and not keys[0].startswith("--"):
        raise SettingsError(
            f"two runs can be compared, not a third, {keys[0]}: for more, use `polynl report`, or train "
            "them by `polynl reproduce`."
        )
    names = [str(first), str(second)]
    tasks = [trained_recipe(path).task for path in (first, second)]
    if tasks[0] != tasks[1]:
        raise SettingsError(f"{names[0]} is trained for {tasks[0]}, {names[1]} for {tasks[1]}.")
    runs = [find_outcomes(path, console, keys) for path in (first, second)]
    task = task_class(tasks[0])
    evidence = _evidence(task, runs, names)
    compared = [
        Compared(
            score,
            evidence.interval(names[0], score),
            evidence.interval(names[1], score),
            evidence.difference(names[1], names[0], score),
        )
        for score in evidence.scores()
    ]
    rows = [[task.scores[c.score], str(c.first), str(c.second), signed(c.difference)] for c in compared]
    for letter, name in zip("AB", names, strict=True):
        console.print(f"{letter}: {name}", highlight=False, markup=False, soft_wrap=True)
    title = f"On {plural(evidence.images, 'image')}, in percent, with 95 % intervals"
    console.print(as_rich(Table.flat(title, ["", "A", "B", "B − A"], rows), console.width))
    chosen = next(c for c in compared if c.score == task.best_by)
    lines = _verdict(chosen, names, task.scores[task.best_by], evidence.too_few)
    best = [path for path in (first, second) if path.name in (BEST, BEST_WEIGHTS)]
    if len(best) == 1:
        lines.append(
            f"{best[0]} is of the epoch that scored best, which flatters it if the images were the same: "
            "compare best with best, or last with last."
        )
    if unequal := unequal_training(runs[0].recipe, runs[1].recipe):
        lines.append(
            f"They were not trained alike, so not only blocks make the difference: {shortened(unequal)}."
        )
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
    if out is not None:
        content = {"first": names[0], "second": names[1], "images": evidence.images}
        scores = [asdict(one) for one in compared]
        write_atomically(out, json.dumps({**content, "scores": scores}, indent=1) + "\n")
    return compared


def _evidence(task: type[Task], runs: Sequence[Scored], names: Sequence[str]) -> Evidence:
    outcomes = dict(zip(names, (run.outcomes for run in runs), strict=True))
    if problem := comparable(list(outcomes.items())):
        raise SettingsError(f"{problem}. Compare runs that were scored on the same validation images.")
    return Evidence(task, {name: {SEED: found} for name, found in outcomes.items()})


def _verdict(compared: Compared, names: Sequence[str], heading: str, too_few: str) -> list[str]:
    difference = compared.difference
    if compared.first.value == compared.second.value == 0:
        return [f"{heading} is 0 for both: neither has learned anything yet that could be compared."]
    if difference.value == difference.low == difference.high == 0:
        found = f"No difference: {heading} is the same, whichever images are drawn."
    elif too_few:
        found = f"{heading} differs by {signed(difference)} points. {too_few}"
    elif difference.beyond_chance:
        better = names[1] if difference.value > 0 else names[0]
        found = f"{better} is better on images like these: {heading} differs by {signed(difference)} points."
    else:
        found = f"No difference beyond chance: {heading} differs by {signed(difference)} points."
    return [
        found,
        f"The intervals are from {REPLICATES:,} replicates in which the images are drawn anew. They leave "
        "out how much trainings with other seeds would differ: for that, use `polynl reproduce --seeds`.",
    ]
