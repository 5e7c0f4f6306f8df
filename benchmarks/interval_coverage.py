"""How often intervals over images contain the truth, for AP, which is no mean over images.

    python benchmarks/interval_coverage.py docs/evidence/coco-people docs/evidence/wider-face

The images of a study are taken for all that there are. Studies of as many images are drawn from them; each
has its 95 % interval, of replicates as in `polynl compare`, which should contain the score on all images. The
network without a block and the one with Poly-NL are those of the first seed.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from polynl.report.load import load_runs
from polynl.results.evidence import CONFIDENCE
from polynl.results.tables import Table, as_markdown
from polynl.tasks.outcomes import Array

ENDS = [(100 - CONFIDENCE) / 2, (100 + CONFIDENCE) / 2]


def coverage(folder: Path, studies: int, replicates: int) -> Table:
    """How many studies have the truth in the interval of the score without a block, and in that of a gain."""
    (study,) = load_runs(sorted(folder.iterdir())).studies
    pair = [base.outcomes()[base.trainings[0].seed] for base in study.bases()]
    images, random = len(pair[0]), np.random.default_rng(0)

    def scored(weights: Array) -> list[dict[str, Array]]:
        """The scores of the network without a block, and the differences to it."""
        plain, block = (study.task_class.score_outcomes(outcomes, weights) for outcomes in pair)
        return [plain, {score: block[score] - plain[score] for score in plain}]

    truth = scored(np.ones((1, images)))
    hits: dict[str, list[list[bool]]] = defaultdict(list)
    for _ in range(studies):
        drawn = random.multinomial(images, np.full(images, 1 / images))
        found = scored(random.multinomial(images, drawn / images, size=replicates).astype(float))
        for score in truth[0]:
            ends = [np.nanpercentile(values[score], ENDS) for values in found]
            hits[score].append(
                [low <= true[score][0] <= high for (low, high), true in zip(ends, truth, strict=True)]
            )
    rows = [
        [
            study.task_class.scores[score],
            f"{truth[0][score][0]:.1f}",
            *(f"{k:.0%}" for k in np.mean(found, 0)),
        ]
        for score, found in hits.items()
    ]
    return Table.flat(
        f"{study.title}: {images} images", ["", "score", "its interval", "the difference"], rows
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="STUDY")
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--replicates", type=int, default=300)
    chosen = parser.parse_args()
    for folder in chosen.folders:
        table = coverage(folder, chosen.studies, chosen.replicates)
        print(f"**{table.title}**\n\n{as_markdown(table)}\n", flush=True)
