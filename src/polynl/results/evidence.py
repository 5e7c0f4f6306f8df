"""How sure a score is, and a difference between scores: intervals over images and seeds.

A replicate draws the images to score on anew, as many as there are and with replacement. All networks are
scored on the drawn images; what counts is the mean over seeds or, for two networks, the mean of their
differences seed by seed. To this, a replicate adds what other seeds would have changed: the standard error
of that mean over the seeds, times a number drawn from Student's t with one degree of freedom fewer than there
are seeds. It does so with many such numbers and their negatives, so that the interval of B − A is that of
A − B in the mirror. Drawing the few seeds themselves would give intervals that end at the best and the worst
of them, which are far too narrow. An interval is from the 2.5th to the 97.5th percentile of the replicates.
Scores are percentages, and a replicate may add a score that no network can have; so intervals of scores are
cut at 0 and 100, and those of differences at −100 and 100.

With one seed only the images are drawn: the interval then leaves out how much trainings differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from polynl.errors import SettingsError
from polynl.results.formats import Interval
from polynl.tasks.base import Task
from polynl.tasks.outcomes import Array, Outcomes

REPLICATES = 1000
# Numbers drawn from Student's t for every replicate; each is also taken with the other sign.
T_DRAWS = 20
CONFIDENCE = 95
# Intervals of fewer images are far too narrow.
FEW_IMAGES = 20
# Images × replicates drawn at a time, which bounds the memory at some 100 MB.
MOST_WEIGHTS = 1 << 22


class Evidence:
    """The outcomes of networks on the same images, by the network's name and the seed of its training."""

    def __init__(
        self,
        task: type[Task],
        outcomes: Mapping[str, Mapping[int, Outcomes]],
        *,
        replicates: int = REPLICATES,
    ) -> None:
        self._task, self._outcomes, self._replicates = task, outcomes, replicates

    def scores(self) -> list[str]:
        """The scores that all networks have."""
        found = self._scored.values()
        return [score for score in self._task.scores if found and all(score in scored for scored in found)]

    def interval(self, name: str, score: str) -> Interval:
        """The mean of a network's score over its seeds."""
        values = {seed: self._scored[name, seed][score] for seed in self._outcomes[name]}
        return self._interval(values, lowest=0)

    def common_seeds(self, name: str, base: str) -> list[int]:
        """The seeds that both networks were trained with."""
        both = (self._outcomes.get(network, {}).keys() for network in (name, base))
        return sorted(set.intersection(*map(set, both)))

    def difference(self, name: str, base: str, score: str) -> Interval:
        """The mean of a network's score minus that of another, over the seeds that both have."""
        seeds = self.common_seeds(name, base)
        return self._interval(
            {seed: self._scored[name, seed][score] - self._scored[base, seed][score] for seed in seeds},
            lowest=-100,
        )

    def seeds(self, name: str) -> int:
        """The number of a network's trainings."""
        return len(self._outcomes.get(name, ()))

    @cached_property
    def images(self) -> int:
        """The number of images."""
        return len(next(outcomes for seeds in self._outcomes.values() for outcomes in seeds.values()))

    @cached_property
    def too_few(self) -> str:
        """That there are too few images to tell a difference from chance, if there are."""
        count = next(outcomes for seeds in self._outcomes.values() for outcomes in seeds.values()).telling
        if count >= FEW_IMAGES:
            return ""
        have = "image has" if count == 1 else "images have"
        return f"Only {count} {have} something to find, too few to tell a difference from chance."

    def _weights(self) -> Iterator[Array]:
        """The images as they are; then how often each replicate draws each image, in several arrays."""
        yield np.ones((1, self.images))
        random, rows = np.random.default_rng(0), max(1, MOST_WEIGHTS // self.images)
        for first in range(0, self._replicates, rows):
            count = min(rows, self._replicates - first)
            yield random.multinomial(self.images, [1 / self.images] * self.images, size=count).astype(float)

    @cached_property
    def _scored(self) -> Mapping[tuple[str, int], Mapping[str, Array]]:
        """By name and seed, the scores on the images as they are, then of every replicate."""
        every = {(name, seed): one for name, seeds in self._outcomes.items() for seed, one in seeds.items()}
        parts: dict[tuple[str, int], list[Mapping[str, Array]]] = {network: [] for network in every}
        for weights in self._weights():
            for network, outcomes in every.items():
                parts[network].append(self._task.score_outcomes(outcomes, weights))
        return {
            network: {score: np.concatenate([part[score] for part in scored]) for score in scored[0]}
            for network, scored in parts.items()
        }

    def _interval(self, values: Mapping[int, Array], lowest: float) -> Interval:
        """The interval of a mean over seeds, from values from `lowest` to 100 as `_scored` has them."""
        by_seed = np.stack([values[seed] for seed in sorted(values)])
        means, seeds = by_seed.mean(0), len(by_seed)
        replicates = means[1:]
        if seeds > 1:
            error = by_seed[:, 0].std(ddof=1) / seeds**0.5
            drawn = error * np.random.default_rng(1).standard_t(seeds - 1, (T_DRAWS, len(replicates)))
            replicates = replicates + np.concatenate([drawn, -drawn])
        # A replicate without anything to find has no score.
        ends = np.nanpercentile(replicates, [(100 - CONFIDENCE) / 2, (100 + CONFIDENCE) / 2])
        low, high = ends.clip(lowest, 100)
        return Interval(float(means[0]), float(low), float(high))


def load_outcomes(path: Path, task: type[Task]) -> Outcomes:
    """Outcomes that the task can score; a SettingsError says what is wrong with the file."""
    outcomes = Outcomes.load(path)
    try:
        scored = task.score_outcomes(outcomes, np.ones((1, len(outcomes))))
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise SettingsError(f"{path} is damaged: {error}.") from None
    if task.best_by not in scored:
        raise SettingsError(f"{path} is not of {task.name}, or is damaged: it has no {task.best_by}.")
    for score, (value,) in scored.items():
        # Images without an object have no AP.
        if not (0 <= value <= 100 or np.isnan(value)):
            raise SettingsError(f"{path} is damaged: its {score} is {value:g}.")
    return outcomes


def comparable(outcomes: Sequence[tuple[str, Outcomes]]) -> str | None:
    """Why outcomes, each with its origin, cannot be compared, if they cannot."""
    (first, reference), *others = outcomes
    for name, other in others:
        if what := reference.difference(other):
            return f"{first} and {name} were scored on different images: {what}"
    return None
