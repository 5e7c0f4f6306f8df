"""The learning rate, step by step, against torch's own schedulers and against the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from polynl.train.config import ScheduleConfig

STEPS, EPOCHS = 7, 12


def factors(part: ScheduleConfig, steps: int = STEPS, epochs: int = EPOCHS) -> list[float]:
    return [part.factor(step, steps, epochs) for step in range(steps * epochs)]


def torchs(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], count: int) -> list[float]:
    """The learning rates of a torch scheduler that starts at 1, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_steps_are_those_of_torch() -> None:
    part = ScheduleConfig(name="steps", milestones=(3, 7, 11), gamma=0.2)
    expected = torchs(
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3 * STEPS, 7 * STEPS, 11 * STEPS], 0.2),
        STEPS * EPOCHS,
    )
    assert factors(part) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_cosine_is_that_of_torch(final: float) -> None:
    expected = torchs(
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS * EPOCHS, final), STEPS * EPOCHS
    )
    assert factors(ScheduleConfig(name="cosine", final=final)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_constant_is_constant() -> None:
    assert factors(ScheduleConfig(name="constant", milestones=(1,), final=0.5)) == [1.0] * (STEPS * EPOCHS)


@pytest.mark.parametrize("name", ["constant", "steps", "cosine"])
@pytest.mark.parametrize("begin", [0.0, 0.1])
@pytest.mark.parametrize("epochs", [0.0, 0.5, 2.0])
def test_the_rise_is_linear_ends_at_the_full_rate_and_never_exceeds_it(
    name: str, begin: float, epochs: float
) -> None:
    part = ScheduleConfig(name=name, warmup_epochs=epochs, warmup_from=begin, milestones=(5,))
    found = factors(part)
    rise = math.floor(epochs * STEPS)
    expected = [begin + (1 - begin) * (step + 1) / (epochs * STEPS) for step in range(rise)]
    assert found[:rise] == pytest.approx(expected, rel=1e-12)
    assert found[rise] == pytest.approx(1.0, abs=0.01)
    assert max(found) <= 1.0
    assert found[rise:] == sorted(found[rise:], reverse=True)


def test_after_the_rise_the_cosine_goes_on_from_the_full_rate_to_the_end() -> None:
    found = factors(ScheduleConfig(name="cosine", warmup_epochs=2, final=0.1))
    rise, left = 2 * STEPS, (EPOCHS - 2) * STEPS
    assert found[rise - 1] == found[rise] == 1.0
    assert found[rise + left // 2] == pytest.approx((1 + 0.1) / 2)
    assert found[-1] == pytest.approx(0.1, abs=0.01)
    assert ScheduleConfig(name="cosine", final=0.1).factor(10**6, STEPS, EPOCHS) == pytest.approx(0.1)


def test_a_rise_over_the_whole_run_ends_with_it() -> None:
    for name in ("steps", "cosine"):
        found = factors(ScheduleConfig(name=name, warmup_epochs=3), epochs=3)
        assert found == pytest.approx([(step + 1) / 21 for step in range(21)])


def test_the_papers_run_by_hand() -> None:
    """8 × 32 images: 5 004 steps an epoch, from 0.1/25 020 up to 0.1, then down by 10 at 30, 60 and 80."""
    part = ScheduleConfig(warmup_epochs=5, milestones=(30, 60, 80))
    rates = {step: 0.1 * part.factor(step, 5004, 90) for step in (0, 12509, 25018, 25019, 150119, 150120)}
    assert rates == pytest.approx(
        {0: 0.1 / 25020, 12509: 0.05, 25018: 0.1 * 25019 / 25020, 25019: 0.1, 150119: 0.1, 150120: 0.01}
    )
    assert [0.1 * part.factor(epoch * 5004, 5004, 90) for epoch in (59, 60, 79, 80, 89)] == pytest.approx(
        [1e-2, 1e-3, 1e-3, 1e-4, 1e-4]
    )
