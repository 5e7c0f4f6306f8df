"""Print the tables of docs/results.md, from the recipes, metrics and outcomes in this folder.

python docs/evidence/tables.py [summary | STUDY ...]
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polynl.report.load import load_runs
from polynl.results.formats import mean_and_spread, percent
from polynl.results.study import Study, Variant
from polynl.results.tables import Table, as_markdown
from polynl.results.verdicts import difference_text

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """What the page shows of a study."""

    name: str
    scores: tuple[str, ...]
    """Each has a table; the summary has the first."""
    non_local: str = "non_local(scale=inner)"
    """The row that the summary calls Non-local."""


SUMMARY = "summary"
STUDIES = {
    "scenes-easy": Entry("[scenes](#scenes-what-needs-to-see-far), easy", ("top1",), "non_local"),
    "scenes-medium": Entry("[scenes](#medium-scenes), medium", ("top1",), "non_local"),
    "tiny-imagenet-20": Entry(
        "[Tiny-ImageNet, 20 classes](#twenty-classes-of-tiny-imagenet), from scratch", ("top1",), "non_local"
    ),
    "finetune": Entry("[the same classes](#fine-tuning-a-resnet-50), a ResNet-50 fine-tuned", ("top1",)),
    "coco-people": Entry(
        "[COCO, people in 288 images](#people-in-288-images-of-coco)", ("box_ap", "mask_ap")
    ),
    "wider-face": Entry(
        "[WIDER FACE, 400 images](#faces-in-400-images-of-wider-face)", ("hard_ap", "medium_ap", "easy_ap")
    ),
}


def summary() -> Table:
    """A row per study: the network without a block, Non-local and Poly-NL, and what Poly-NL adds to both."""
    rows = []
    for name, entry in STUDIES.items():
        study = load(name)
        of_row = {variant.row: variant for variant in study.variants}
        none, non_local, poly_nl = (of_row[row] for row in ("none", entry.non_local, "poly_nl"))
        score = entry.scores[0]
        means = [percent(statistics.mean(v.last(score))) for v in (none, non_local, poly_nl)]
        differences = [difference_text(study, poly_nl, base, score) for base in (none, non_local)]
        heading, seeds = study.task_class.scores[score], str(len(poly_nl.trainings))
        rows.append([entry.name, seeds, heading, *means, *differences])
    headings = ["what", "seeds", "score", "no block", "Non-local", "Poly-NL"]
    return Table.flat("Summary", [*headings, "Poly-NL minus no block", "Poly-NL minus Non-local"], rows)


def tables(name: str) -> Iterator[Table]:
    """The summary, or for every score of a study a table of seeds, their mean and the paired differences."""
    if name == SUMMARY:
        yield summary()
        return
    study = load(name)
    seeds = sorted({training.seed for variant in study.variants for training in variant.trainings})
    first, *others = map(str, seeds)
    differences = [f"minus {base.label}" for base in study.bases()]
    headings = ["", f"seed {first}", *others, "mean ± standard deviation", *differences]
    for score in STUDIES[name].scores:
        rows = [
            [
                variant.label,
                *_scores(variant, score, seeds),
                *(difference_text(study, variant, base, score) for base in study.bases()),
            ]
            for variant in study.variants
        ]
        yield Table.flat(f"{name}, {study.task_class.scores[score]}", headings, rows)


@cache
def load(name: str) -> Study:
    """A study in this folder, whose trainings must all be comparable."""
    (study,) = load_runs(sorted((FOLDER / name).iterdir())).studies
    return study


def _scores(variant: Variant, score: str, seeds: Sequence[int]) -> list[str]:
    last = {training.seed: training.last(score) for training in variant.trainings}
    found = [percent(value) if (value := last.get(seed)) is not None else "" for seed in seeds]
    return [*found, mean_and_spread(variant.last(score)) if len(variant.last(score)) > 1 else ""]


if __name__ == "__main__":
    known = [SUMMARY, *STUDIES]
    if unknown := [name for name in sys.argv[1:] if name not in known]:
        sys.exit(f"there are no tables of {', '.join(unknown)}; choose from {', '.join(known)}")
    for chosen in sys.argv[1:] or known:
        for table in tables(chosen):
            print(f"**{table.title}**\n\n{as_markdown(table)}\n")
