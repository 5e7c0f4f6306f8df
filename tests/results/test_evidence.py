"""Bootstrap intervals: against their definition, and how often they contain the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polynl.errors import SettingsError
from polynl.results.evidence import Evidence, comparable, load_outcomes
from polynl.tasks.classification.task import Classification
from polynl.tasks.outcomes import Array, Outcomes


def outcomes(right: Array) -> Outcomes:
    names = np.array([f"image {number:05}" for number in range(len(right))])
    return Outcomes(names, np.zeros(len(right), dtype=int), {"top1": right.astype(bool)})


def evidence(replicates: int = 1000, **networks: list[Array]) -> Evidence:
    found = {name: {seed: outcomes(r) for seed, r in enumerate(seeds)} for name, seeds in networks.items()}
    return Evidence(Classification, found, replicates=replicates)


def simulated(
    random: np.random.Generator, *, gain: float, seeds: int, images: int = 250, spread: float = 0.1
) -> Evidence:
    """Two networks on images of different difficulty; the second is better by `gain`.

    `spread` is that of seeds; 0.1 are about two points.
    """
    difficulty = random.normal(0.0, 0.8, images)

    def network(level: float) -> list[Array]:
        taste = random.normal(0.0, 0.3, images)
        return [
            random.random(images)
            < 1 / (1 + np.exp(-(level + difficulty + taste + random.normal(0.0, spread))))
            for _ in range(seeds)
        ]

    return evidence(300, plain=network(0.5), block=network(0.5 + gain))


def test_the_value_is_the_mean_over_seeds() -> None:
    found = evidence(a=[np.array([1, 1, 0, 0]), np.array([1, 1, 1, 0])], b=[np.array([1, 0, 0, 0])] * 2)
    assert found.interval("a", "top1").value == 62.5
    assert found.difference("a", "b", "top1").value == 37.5
    assert found.difference("b", "a", "top1").value == -37.5
    assert found.scores() == ["top1"]
    assert (found.images, found.seeds("a"), found.common_seeds("a", "b")) == (4, 2, [0, 1])


def test_the_interval_of_one_seed_is_that_of_the_binomial() -> None:
    right = np.arange(2000) % 4 > 0
    interval = evidence(a=[right]).interval("a", "top1")
    error = 100 * (0.75 * 0.25 / 2000) ** 0.5
    assert interval.value == 75
    assert interval.low == pytest.approx(75 - 1.96 * error, abs=0.15)
    assert interval.high == pytest.approx(75 + 1.96 * error, abs=0.15)


def test_differences_are_paired_by_image_and_by_seed() -> None:
    random = np.random.default_rng(0)
    seeds = [random.random(300) < rate for rate in (0.2, 0.5, 0.8)]
    # Seeds differ a lot, and so do images; the second network is right on ten more images with every seed.
    better = [np.where(np.cumsum(~right) <= 10, True, right) for right in seeds]
    found = evidence(a=seeds, b=better)
    alone, difference = found.interval("b", "top1"), found.difference("b", "a", "top1")
    assert alone.high - alone.low > 30
    assert difference.value == pytest.approx(100 * 10 / 300)
    assert difference.high - difference.low < 8 < alone.high - alone.low
    assert difference.beyond_chance


def test_a_network_does_not_differ_from_its_equal() -> None:
    right = [np.random.default_rng(seed).random(50) < 0.5 for seed in range(2)]
    difference = evidence(a=right, b=right).difference("a", "b", "top1")
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)
    assert not difference.beyond_chance


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_the_interval_of_the_opposite_difference_is_the_opposite(seeds: int) -> None:
    study = simulated(np.random.default_rng(seeds), gain=0.3, seeds=seeds)
    forth, back = (study.difference(*pair, "top1") for pair in (("block", "plain"), ("plain", "block")))
    assert (forth.value, forth.low, forth.high) == pytest.approx((-back.value, -back.high, -back.low))


def test_only_common_seeds_are_compared() -> None:
    right = [np.ones(20), np.zeros(20), np.ones(20)]
    found = evidence(a=right, b=right[:1])
    assert found.difference("a", "b", "top1").value == 0
    assert found.common_seeds("a", "c") == []
    assert found.seeds("c") == 0


@pytest.mark.parametrize("spread", [0.05, 0.3])
@pytest.mark.parametrize(("seeds", "images"), [(2, 250), (3, 1000), (5, 250)])
def test_intervals_contain_the_truth(seeds: int, images: int, spread: float) -> None:
    """In 95 % of simulated studies of two networks that do not differ; of 80, chance loses some more."""
    random, hits, studies = np.random.default_rng(7), 0, 80
    for _ in range(studies):
        study = simulated(random, gain=0.0, seeds=seeds, images=images, spread=spread)
        hits += not study.difference("block", "plain", "top1").beyond_chance
    assert hits / studies >= 0.9


def test_the_seeds_count_as_in_students_interval() -> None:
    """Where all images are alike, the interval of the mean is Student's."""
    rates = np.array([0.5, 0.6, 0.8])
    interval = evidence(20_000, a=[np.arange(1000) < 1000 * rate for rate in rates]).interval("a", "top1")
    error = 100 * rates.std(ddof=1) / 3**0.5
    half = (interval.high - interval.low) / 2
    assert interval.value == pytest.approx(100 * rates.mean())
    assert half == pytest.approx(4.303 * error, rel=0.05)  # t with 2 degrees of freedom, at 97.5 %


def test_intervals_end_where_percentages_do() -> None:
    """With two seeds far apart, Student's interval is many times as wide as any score can be."""
    all_right, none_right = np.ones(20), np.zeros(20)
    found = evidence(a=[all_right, none_right], b=[none_right, all_right])
    alone, difference = found.interval("a", "top1"), found.difference("a", "b", "top1")
    assert (alone.value, alone.low, alone.high) == (50, 0, 100)
    assert (difference.value, difference.low, difference.high) == (0, -100, 100)
    # A lower score may differ from a higher one by less than 0, however few the seeds.
    low, high = [np.arange(20) < 2, np.arange(20) < 3], [all_right, all_right]
    worse = evidence(a=low, b=high).difference("a", "b", "top1")
    assert worse.low == -100 < worse.value < worse.high < 0


def test_replicates_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [np.random.default_rng(seed).random(50) < 0.5 for seed in range(2)]
    whole = evidence(a=right).interval("a", "top1")
    monkeypatch.setattr("polynl.results.evidence.MOST_WEIGHTS", 350)
    assert evidence(a=right).interval("a", "top1") == whole


def test_a_real_difference_is_found() -> None:
    random = np.random.default_rng(3)
    found = [simulated(random, gain=0.9, seeds=5).difference("block", "plain", "top1") for _ in range(20)]
    assert sum(interval.beyond_chance and interval.value > 0 for interval in found) >= 19


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = outcomes(np.array([1, 0, 1]))
    written.save(tmp_path / "outcomes.npz")
    read = Outcomes.load(tmp_path / "outcomes.npz")
    assert read.difference(written) is None
    assert read.arrays["top1"].tolist() == [True, False, True]


@pytest.mark.parametrize("keep", [0, 10, 200, -1])
def test_a_damaged_file_is_named(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "outcomes.npz"
    outcomes(np.ones(30)).save(file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SettingsError, match=r"outcomes\.npz"):
        load_outcomes(file, Classification)


def test_any_changed_byte_is_harmless_or_an_error_in_words(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.npz"
    outcomes(np.arange(30) % 2).save(file)
    content = file.read_bytes()
    for place in range(0, len(content), 3):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            load_outcomes(file, Classification)
        except SettingsError as error:
            assert "outcomes.npz" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"top1": np.ones(9)},
        {"top1": np.array(["yes"] * 5)},
        {"top1": np.ones(())},
        {"other": np.ones(5)},
        {"top1": np.full(5, np.nan)},
        {"top1": np.full(5, 7)},
    ],
    ids=str,
)
def test_a_file_that_the_task_cannot_score_is_named(arrays: dict[str, Array], tmp_path: Path) -> None:
    names = np.array([f"{number}" for number in range(5)])
    Outcomes(names, np.zeros(5), arrays).save(tmp_path / "outcomes.npz")
    with pytest.raises(SettingsError, match=r"outcomes\.npz is"):
        load_outcomes(tmp_path / "outcomes.npz", Classification)


def test_other_images_and_other_labels_cannot_be_compared() -> None:
    first, fewer = outcomes(np.ones(5)), outcomes(np.ones(4))
    renamed = Outcomes(np.array([f"picture {k}" for k in range(5)]), first.truth, first.arrays)
    labelled = Outcomes(first.images, np.array([0, 0, 1, 0, 0]), first.arrays)
    assert comparable([("a", first), ("b", outcomes(np.zeros(5)))]) is None
    for other, reason in (
        (fewer, "5 images, and 4"),
        (renamed, "image 00000, and picture 0"),
        (labelled, "image 00002 with different labels"),
    ):
        assert comparable([("a", first), ("b", other)]) == (
            f"a and b were scored on different images: {reason}"
        )
