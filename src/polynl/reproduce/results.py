"""The figures of all trainings, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polynl.report.tables import with_spread
from polynl.reproduce.costs import Cost
from polynl.results.paper import LABELS, PAPER
from polynl.results.tables import Table

IMAGENET = PAPER["classification"]
SCORES = IMAGENET.headings


@dataclass(frozen=True)
class Outcome:
    """One block: the epochs of its trainings, one for each seed, and its cost."""

    block: str
    runs: Mapping[int, Sequence[Mapping[str, Any]]]
    cost: Cost

    def last(self, score: str) -> list[float]:
        """A score after the last epoch, for every seed; empty where the task has no such score."""
        return [rows[-1][score] for rows in self.runs.values() if score in rows[-1]]

    @property
    def minutes(self) -> float:
        """Of training, the mean over seeds."""
        return statistics.mean(sum(row["seconds"] for row in rows) for rows in self.runs.values()) / 60

    def to_json(self) -> dict[str, Any]:
        """All of it; the paper's figures are those of ResNet-50 on ImageNet."""
        return {
            "block": self.block,
            "label": LABELS[self.block],
            **{score: self.last(score) for score in SCORES if self.last(score)},
            "minutes": self.minutes,
            **asdict(self.cost),
            "paper": IMAGENET.figures(self.block),
            "epochs": {str(seed): list(rows) for seed, rows in self.runs.items()},
        }


def accuracy_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Like the paper's table of ImageNet results, with the costs beside, and the paper's own figures last."""
    plain = outcomes[0].cost
    scores = {score: heading for score, heading in SCORES.items() if outcomes[0].last(score)}
    rows = []
    for outcome in outcomes:
        cost = outcome.cost
        rows.append(
            [
                LABELS[outcome.block],
                *(with_spread(outcome.last(score)) for score in scores),
                f"{cost.parameters / 1e3:.1f} k",
                f"{cost.multiply_adds / 1e6:.2f} M",
                f"{cost.forward_seconds / plain.forward_seconds:.2f}",
                f"{cost.training_seconds / plain.training_seconds:.2f}",
                "/".join(f"{figure:.2f}" for figure in IMAGENET.rows[outcome.block]),
            ]
        )
    headings = ["", *scores.values(), "params", "MACs", "forward", "step", "paper"]
    return Table(title, headings, rows)
