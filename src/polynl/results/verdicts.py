"""What the intervals of a study say: a table for every score, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polynl.blocks.registry import NO_BLOCK
from polynl.results.block_figures import idle_blocks
from polynl.results.evidence import REPLICATES, Evidence
from polynl.results.formats import NOT_MEASURED, Interval, plural, signed
from polynl.results.study import Study, Variant
from polynl.results.tables import Columns, Row, Table

# What all others are compared with: the network without a block, and the paper's block.
BASES = (NO_BLOCK, "poly_nl")


def evidence_tables(study: Study) -> list[Table]:
    """For every score shown after each epoch: its interval, and the differences to both bases."""
    if study.evidence is None:
        return []
    wanted = [score for score in study.task_class.headline if score in study.evidence.scores()]
    return [_evidence_table(study, study.evidence, score) for score in wanted]


def _evidence_table(study: Study, evidence: Evidence, score: str) -> Table:
    bases, rows = _bases(study), []
    for variant in study.variants:
        cells = [NOT_MEASURED] * (1 + len(bases))
        if evidence.seeds(variant.label):
            mean = str(evidence.interval(variant.label, score))
            cells = [mean, *(_against(study, variant, base, score) for base in bases)]
        rows.append(Row(variant.label, cells))
    headings = ["mean", *(f"minus {base.label}" for base in bases)]
    heading = study.task_class.scores[score]
    title = f"{heading}, and its paired differences, with 95 % intervals; *: beyond chance"
    return Table(title, [Columns("", headings)], rows)


def _against(study: Study, variant: Variant, base: Variant, score: str) -> str:
    difference = study.difference(variant, base, score)
    if difference is None:
        return ""
    return signed(difference) + (" *" if difference.beyond_chance else "")


def _bases(study: Study) -> list[Variant]:
    return [variant for row in BASES for variant in study.variants if variant.row == row][: len(BASES)]


def verdicts(study: Study) -> list[str]:
    """Which differences are beyond chance, how that was found out, and which blocks do nothing."""
    return [*_sentences(study), *_idle(study)]


def _sentences(study: Study) -> Iterator[str]:
    score, compared = study.task_class.best_by, 0
    if study.evidence is None or score not in study.evidence.scores():
        return
    for base in _bases(study):
        found = [
            (variant.label, difference)
            for variant in study.variants
            if (difference := study.difference(variant, base, score)) is not None
        ]
        compared += len(found)
        if found:
            heading = f"{study.task_class.scores[score]} against {base.label}"
            yield f"{heading}: {_sorted_by_chance(found)}."
    evidence = study.evidence
    seeds = max(evidence.seeds(variant.label) for variant in study.variants)
    drawn = f"the {evidence.images:,} images" + (f" and the {seeds} seeds" if seeds > 1 else "")
    note = f"Intervals are of 95 %, from {REPLICATES:,} bootstrap replicates that draw {drawn} anew."
    if seeds == 1:
        note += " With one seed they leave out how much trainings differ, so they are too narrow."
    if compared > 1:
        note += " If nothing made a difference, one in twenty would still seem to be beyond chance."
    yield note


def _sorted_by_chance(found: Sequence[tuple[str, Interval]]) -> str:
    groups = {
        "beyond chance": [pair for pair in found if pair[1].beyond_chance],
        "within chance": [pair for pair in found if not pair[1].beyond_chance],
    }
    texts = [
        f"{name}: " + ", ".join(f"{label} {signed(difference)}" for label, difference in pairs)
        for name, pairs in groups.items()
        if pairs
    ]
    return "; ".join(texts)


def _idle(study: Study) -> Iterator[str]:
    """Sentences about blocks that did nothing in any training."""
    for variant in study.variants:
        lines = [idle_blocks(training.rows) for training in variant.trainings]
        if all(lines):
            trainings = plural(len(lines), "training")
            yield f"{variant.label}, in {trainings}: {lines[0][0]}"
