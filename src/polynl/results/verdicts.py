"""What the intervals of a study say: a table for every score, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polynl.results.block_figures import idle_blocks
from polynl.results.evidence import REPLICATES, Evidence
from polynl.results.formats import NOT_MEASURED, Interval, signed
from polynl.results.study import BASES, Study, Variant
from polynl.results.tables import Columns, Row, Table


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
    first = {variant.row: variant for variant in reversed(study.variants)}
    return [first[row] for row in BASES if row in first]


def verdicts(study: Study) -> list[str]:
    """Which differences are beyond chance, how that was found out, and which blocks do nothing."""
    return [*_sentences(study), *_idle(study)]


def _sentences(study: Study) -> Iterator[str]:
    score, evidence = study.task_class.best_by, study.evidence
    if study.different_images:
        yield f"There are no intervals: {study.different_images}."
    if evidence is None or score not in evidence.scores():
        return
    compared: list[tuple[Variant, Variant]] = []
    for base in _bases(study):
        # A pair that was compared the other way round says nothing new.
        others = [v for v in study.variants if (base, v) not in compared]
        found = [(v, d) for v in others if (d := study.difference(v, base, score)) is not None]
        compared += [(variant, base) for variant, _ in found]
        if found:
            heading = f"{study.task_class.scores[score]} against {base.label}"
            yield f"{heading}: {_sorted_by_chance([(variant.label, d) for variant, d in found])}."
    yield _how(evidence, compared)


def _how(evidence: Evidence, compared: Sequence[tuple[Variant, Variant]]) -> str:
    """Where the intervals come from, and what they leave out."""
    seeds = sorted({len(evidence.common_seeds(one.label, other.label)) for one, other in compared})
    text = (
        f"Intervals are of 95 %, from {REPLICATES:,} bootstrap replicates that draw the "
        f"{evidence.images:,} images anew"
    )
    if seeds and seeds[-1] > 1:
        counts = f"{seeds[-1]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        text += f" and allow for the spread over {counts} seeds that both networks have"
    text += "."
    if not seeds or seeds[0] == 1:
        text += " With one seed they leave out how much trainings differ, so they are too narrow."
    if len(compared) > 1:
        text += " If nothing made a difference, one in twenty would still seem to be beyond chance."
    return text


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
            yield from (
                f"{variant.label}, with seed {variant.trainings[0].seed}: {line}" for line in lines[0]
            )
