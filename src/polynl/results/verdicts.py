"""What the intervals of a study say: a table for every score, and sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from polynl.errors import shortened
from polynl.results.block_figures import idle_blocks, idle_sentence
from polynl.results.evidence import REPLICATES, Evidence
from polynl.results.formats import NOT_MEASURED, Interval, plural, points, signed
from polynl.results.study import Study, Variant
from polynl.results.tables import Columns, Row, Table
from polynl.tasks.outcomes import OUTCOMES


def evidence_tables(study: Study) -> list[Table]:
    """For every score shown after each epoch: its interval, and the differences to both bases.

    A single variant has nothing to differ from.
    """
    if study.evidence is None or len(study.variants) < 2:
        return []
    wanted = [score for score in study.task_class.headline if score in study.evidence.scores()]
    return [_evidence_table(study, study.evidence, score) for score in wanted]


def _evidence_table(study: Study, evidence: Evidence, score: str) -> Table:
    bases, rows = study.bases(), []
    for variant in study.variants:
        cells = [NOT_MEASURED] * (1 + len(bases))
        seeds = evidence.seeds(variant.label)
        if seeds:
            mean = str(evidence.interval(variant.label, score))
            cells = [mean, *(difference_text(study, variant, base, score) for base in bases)]
        rows.append(Row(variant.label, [str(seeds), *cells]))
    headings = ["seeds", "mean", *(f"minus {base.label}" for base in bases)]
    heading = study.task_class.scores[score]
    title = f"{heading}, and its paired differences, with 95 % intervals; *: beyond chance"
    return Table(title, [Columns("", headings)], rows)


def difference_text(study: Study, variant: Variant, base: Variant, score: str) -> str:
    """A paired difference with its interval, and a star if it is beyond chance; empty if there is none."""
    difference = study.difference(variant, base, score)
    if difference is None:
        return ""
    return signed(difference) + (" *" if difference.beyond_chance else "")


def conclusion(study: Study) -> str:
    """What a reader takes away, in a sentence: which blocks change the main score, beyond noise."""
    score, plain = study.task_class.best_by, study.plain()
    heading = study.task_class.scores[score]
    scored = [variant for variant in study.variants if variant.last(score)]
    if study.note or not scored:
        return study.note or f"There is no {heading} yet."
    if not any(value for variant in scored for value in variant.last(score)):
        return f"{heading} is 0 in all trainings: nothing has been learned that it could tell apart."
    best = max(scored, key=lambda variant: statistics.mean(variant.last(score)))
    leading = (
        f"{best.label} has the highest {heading}" if len(scored) > 1 else f"Only {best.label} was scored"
    )
    others = [variant for variant in scored if variant is not plain]
    if plain not in scored or not others:
        return f"{leading}: to see what a block changes, train the network without and with it."
    found = {v.label: d for v in others if plain and (d := study.difference(v, plain, score)) is not None}
    open_ones = [v for v in others if v.label not in found]
    if not found:
        return f"{leading}, but whether that is chance is open: {_why_open(study, others)}."
    said = _changes(heading, list(found.items())) + _caveat(study, found)
    if open_ones:
        labels = " and ".join(v.label for v in open_ones)
        said += f" What {labels} would change is open: {_why_open(study, open_ones)}."
    return said


def _why_open(study: Study, variants: Sequence[Variant]) -> str:
    """Why the differences of variants to the network without a block are not known."""
    if study.different_images:
        return "the trainings were scored on different images"
    compared = [v for v in (study.plain(), *variants) if v is not None]
    if study.evidence is None or not all(study.evidence.seeds(v.label) for v in compared):
        return "there are no outcomes of images to tell from"
    return "they have no seed in common with the network without a block"


def _changes(heading: str, found: Sequence[tuple[str, Interval]]) -> str:
    """Which differences to the network without a block are more than noise."""
    ranked = sorted(found, key=lambda pair: abs(pair[1].value), reverse=True)
    groups = {
        "higher": [pair for pair in ranked if pair[1].beyond_chance and pair[1].value > 0],
        "lower": [pair for pair in ranked if pair[1].beyond_chance and pair[1].value < 0],
        "within noise": [pair for pair in ranked if not pair[1].beyond_chance],
    }
    if len(ranked) == 1:
        label, largest = ranked[0]
        word = next(word for word, pairs in groups.items() if pairs)
        verdict = "is within noise of that" if word == "within noise" else f"is {word} than"
        return f"{heading} with {label} {verdict} without a block: {signed(largest)}."
    if len(groups["within noise"]) == len(ranked):
        lowest, highest = (f([end for _, d in ranked for end in (d.low, d.high)]) for f in (min, max))
        possible = f"differences from {points(lowest)} to {points(highest)} remain possible"
        return f"No block changes {heading} beyond noise; {possible}."
    said = [f"{word} with {_listed(pairs)}" for word, pairs in groups.items() if pairs]
    return f"Compared with no block, {heading} is {'; '.join(said)}."


def _listed(pairs: Sequence[tuple[str, Interval]]) -> str:
    texts = [f"{label} ({points(difference.value)})" for label, difference in pairs]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _caveat(study: Study, labels: Iterable[str]) -> str:
    """What differences to the network without a block may be due to other than the block."""
    plain, evidence = study.plain(), study.evidence
    said = ""
    if plain is None or evidence is None:
        return said
    if any(len(evidence.common_seeds(label, plain.label)) == 1 for label in labels):
        said += " With one seed in common, how much trainings differ is not counted as noise."
    if evidence.too_few:
        said += f" {evidence.too_few}"
    return said + (f" The trainings also differ in {shortened(study.unequal)}." if study.unequal else "")


def verdicts(study: Study) -> list[str]:
    """Which differences are beyond chance, how that was found out, and which blocks do nothing."""
    return [*_unfinished(study), *_without_outcomes(study), *_sentences(study), *_idle(study)]


def _unfinished(study: Study) -> Iterator[str]:
    found = [
        f"{variant.label} with seed {t.seed} (epoch {len(t.rows)} of {t.recipe['epochs']})"
        for variant in study.variants
        for t in variant.trainings
        if not t.finished
    ]
    if found:
        yield f"Not finished, but counted in the means: {', '.join(found)}."


def _without_outcomes(study: Study) -> Iterator[str]:
    evidence = study.evidence
    if evidence is None:
        return
    found = [
        f"{variant.label} with seed {training.seed}"
        for variant in study.variants
        for training in variant.trainings
        if training.finished and training.seed not in evidence.common_seeds(variant.label, variant.label)
    ]
    if found:
        yield (
            f"Without {OUTCOMES}, and so in the scores but not in the intervals: {', '.join(found)}. "
            "`polynl reproduce --resume` writes it again for its own trainings."
        )


def _sentences(study: Study) -> Iterator[str]:
    score, evidence = study.task_class.best_by, study.evidence
    if study.different_images:
        yield f"There are no intervals: {study.different_images}."
    if evidence is None or score not in evidence.scores():
        return
    compared: list[tuple[Variant, Variant]] = []
    for base in study.bases():
        # A pair that was compared the other way round says nothing new.
        others = [v for v in study.variants if (base, v) not in compared]
        found = [(v, d) for v in others if (d := study.difference(v, base, score)) is not None]
        compared += [(variant, base) for variant, _ in found]
        if found:
            heading = f"{study.task_class.scores[score]} against {base.label}"
            yield f"{heading}, {_sorted_by_chance([(variant.label, d) for variant, d in found])}."
    yield _how(evidence, compared)


def _how(evidence: Evidence, compared: Sequence[tuple[Variant, Variant]]) -> str:
    """Where the intervals come from, and what they leave out."""
    seeds = sorted({len(evidence.common_seeds(one.label, other.label)) for one, other in compared})
    text = (
        f"Intervals are of 95 %, from {REPLICATES:,} bootstrap replicates that draw the "
        f"{plural(evidence.images, 'image')} anew"
    )
    if seeds and seeds[-1] > 1:
        counts = f"{seeds[-1]} seeds" if len(seeds) == 1 else f"the {seeds[0]} to {seeds[-1]} seeds in common"
        text += f" and allow for the spread over {counts}"
    text += "."
    if not seeds or seeds[0] == 1:
        text += " With one seed they leave out how much trainings differ, so they are too narrow."
    if evidence.too_few:
        text += f" {evidence.too_few}"
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
    """Sentences about blocks that did nothing, and in which trainings."""
    for variant in study.variants:
        every = [training.seed for training in variant.trainings]
        shares: dict[str, dict[int, float]] = {}
        for training in variant.trainings:
            for block, largest in idle_blocks(training.rows).items():
                shares.setdefault(block, {})[training.seed] = largest
        for block, by_seed in shares.items():
            seeds = ", ".join(map(str, by_seed))
            where = f"seed {seeds}" if len(every) == 1 else f"{len(by_seed)} of {len(every)} seeds ({seeds})"
            yield f"{variant.label}, with {where}: {idle_sentence(block, max(by_seed.values()))}"
