"""How sure a score is, and a difference between scores: bootstrap intervals over images and seeds.

A replicate draws the images to score on anew, as many as there are and with replacement, and the seeds, one
fewer than there are: with so few, drawing all of them would give too small a spread. All networks are scored
on the drawn images; what counts is the mean over the drawn seeds or, for two networks, the mean of their
differences seed by seed. An interval is from the 2.5th to the 97.5th percentile of the replicates.

With one seed only the images are drawn: the interval then leaves out how much trainings differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from polynl.results.formats import Interval
from polynl.tasks.base import Task
from polynl.tasks.outcomes import Array, Outcomes

REPLICATES = 1000
CONFIDENCE = 95


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
        self._scores: dict[tuple[str, int], Mapping[str, Array]] = {}

    def scores(self) -> list[str]:
        """The scores that all networks have."""
        found = [set(self._scored(name, seed)) for name, seeds in self._outcomes.items() for seed in seeds]
        return [score for score in self._task.scores if found and all(score in names for names in found)]

    def interval(self, name: str, score: str) -> Interval:
        """The mean of a network's score over its seeds."""
        return self._interval({seed: self._scored(name, seed)[score] for seed in self._outcomes[name]})

    def common_seeds(self, name: str, base: str) -> list[int]:
        """The seeds that both networks were trained with."""
        both = (self._outcomes.get(network, {}).keys() for network in (name, base))
        return sorted(set.intersection(*map(set, both)))

    def difference(self, name: str, base: str, score: str) -> Interval:
        """The mean of a network's score minus that of another, over the seeds that both have."""
        seeds = self.common_seeds(name, base)
        return self._interval(
            {seed: self._scored(name, seed)[score] - self._scored(base, seed)[score] for seed in seeds}
        )

    def seeds(self, name: str) -> int:
        """The number of a network's trainings."""
        return len(self._outcomes.get(name, ()))

    @cached_property
    def images(self) -> int:
        """The number of images."""
        return len(next(iter(self._each())))

    def _each(self) -> Iterator[Outcomes]:
        return (outcomes for seeds in self._outcomes.values() for outcomes in seeds.values())

    @cached_property
    def _weights(self) -> Array:
        """How often each replicate draws each image; the first row is the images as they are."""
        random = np.random.default_rng(0)
        drawn = random.multinomial(self.images, [1 / self.images] * self.images, size=self._replicates)
        return np.concatenate([np.ones((1, self.images)), drawn])

    def _scored(self, name: str, seed: int) -> Mapping[str, Array]:
        """The scores on the images as they are, then of every replicate."""
        if (name, seed) not in self._scores:
            self._scores[name, seed] = self._task.score_outcomes(self._outcomes[name][seed], self._weights)
        return self._scores[name, seed]

    def _interval(self, values: Mapping[int, Array]) -> Interval:
        """The interval of a mean over seeds, from values as `_scored` has them."""
        by_seed = np.stack([values[seed] for seed in sorted(values)])
        drawn = self._drawn_seeds(len(by_seed))
        means = np.take_along_axis(by_seed[:, 1:], drawn, axis=0).mean(0)
        low, high = np.percentile(means, [(100 - CONFIDENCE) / 2, (100 + CONFIDENCE) / 2])
        return Interval(float(by_seed[:, 0].mean()), float(low), float(high))

    def _drawn_seeds(self, count: int) -> Array:
        """For each replicate, the places of one seed fewer than there are: the same for every network."""
        return np.random.default_rng(1).integers(count, size=(max(1, count - 1), self._replicates))


def comparable(outcomes: Sequence[tuple[str, Outcomes]]) -> str | None:
    """Why outcomes, each with its origin, cannot be compared, if they cannot."""
    (first, reference), *others = outcomes
    for name, other in others:
        if what := reference.difference(other):
            return f"{first} and {name} were scored on different images: {what}"
    return None
