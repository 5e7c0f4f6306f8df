"""The figures of all trainings, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polynl.bench.report import Table
from polynl.reproduce.costs import Cost
from polynl.reproduce.settings import PAPER

SCORES = {"top1": "Top-1", "top5": "Top-5"}


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
        label, top1, top5 = PAPER[self.block]
        return {
            "block": self.block,
            "label": label,
            **{score: self.last(score) for score in SCORES if self.last(score)},
            "minutes": self.minutes,
            **asdict(self.cost),
            "paper": {"top1": top1, "top5": top5},
            "epochs": {str(seed): list(rows) for seed, rows in self.runs.items()},
        }


def accuracy_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Like the paper's table of ImageNet results, with the costs beside, and the paper's own figures last."""
    plain = outcomes[0].cost
    scores = {score: heading for score, heading in SCORES.items() if outcomes[0].last(score)}
    rows = []
    for outcome in outcomes:
        label, top1, top5 = PAPER[outcome.block]
        cost = outcome.cost
        rows.append(
            [
                label,
                *(with_spread(outcome.last(score)) for score in scores),
                f"{cost.parameters / 1e3:.1f} k",
                f"{cost.multiply_adds / 1e6:.2f} M",
                f"{cost.forward_seconds / plain.forward_seconds:.2f}",
                f"{cost.training_seconds / plain.training_seconds:.2f}",
                f"{top1:.2f}/{top5:.2f}",
            ]
        )
    headings = ["", *scores.values(), "params", "MACs", "forward", "step", "paper"]
    return Table(title, headings, rows)


def with_spread(values: Sequence[float]) -> str:
    """The mean, and with several values their standard deviation.

    >>> with_spread([70.0]), with_spread([70.0, 72.0])
    ('70.0', '71.0 ± 1.4')
    """
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"
