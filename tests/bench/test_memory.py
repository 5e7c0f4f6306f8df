"""Peak memory against allocations that are known, those inside an operator among them."""

import pytest
import torch
from torch import nn

from polynl.bench.cases import CASES, PEERS, Case, randomised
from polynl.bench.measure import Task, task
from polynl.bench.memory import peak_bytes
from polynl.results.benchmark import Point, Step

FLOAT = 4


def test_result_of_a_convolution() -> None:
    step = task(nn.Conv2d(64, 64, 1, bias=False), torch.randn(1, 64, 32, 32), "forward")
    assert peak_bytes(step) == 64 * 32 * 32 * FLOAT


def test_training_step_holds_result_and_both_gradients() -> None:
    step = task(nn.Conv2d(64, 64, 1, bias=False), torch.randn(1, 64, 32, 32), "training")
    assert peak_bytes(step) == (2 * 64 * 32 * 32 + 64 * 64) * FLOAT


def test_temporary_that_lives_and_dies_inside_an_operator() -> None:
    x = torch.randn(100_000)
    result_bytes = FLOAT
    peak = peak_bytes(Task(lambda: torch.logsumexp(x, 0)))
    assert x.numel() * FLOAT <= peak < 1.01 * x.numel() * FLOAT + result_bytes


def test_temporaries_that_follow_each_other_do_not_add_up() -> None:
    x = torch.randn(100_000)
    # Each step frees the one before it: three results, of which two are alive at once.
    assert peak_bytes(Task(lambda: x.exp().exp().exp())) == 2 * x.numel() * FLOAT


def test_what_was_there_before_is_not_counted() -> None:
    held = [torch.randn(100_000)]
    assert peak_bytes(Task(lambda: held.pop().sum())) <= 64


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(Task(lambda: torch.ones(10)))
    assert capfd.readouterr() == ("", "")


def test_gradients_do_not_survive() -> None:
    module = nn.Conv2d(4, 4, 1)
    peak_bytes(task(module, torch.randn(1, 4, 4, 4), "training"))
    assert module.weight.grad is None


QUADRATIC = [case for case in (*CASES, *PEERS) if case.largest_matrices is not None]


@pytest.mark.parametrize("case", QUADRATIC, ids=lambda case: case.name)
@pytest.mark.parametrize("step", ["forward", "training"])
def test_predictions_are_near_what_is_measured(case: Case, step: Step) -> None:
    """A prediction far above would leave out layers that fit; one far below would exhaust the machine."""
    if not case.available():
        pytest.skip(f"{case.package} is not installed")
    # Many positions and few channels, so that the matrices outweigh the maps.
    peak = peak_bytes(task(randomised(case.build(8), 0), torch.randn(2, 8, 40, 40), step))
    predicted = case.predicted_peak(Point(step, 2, 40, 8), FLOAT)
    assert predicted is not None
    assert 0.6 * peak <= predicted <= 1.5 * peak


@pytest.mark.parametrize("case", [case for case in CASES if case not in QUADRATIC], ids=lambda c: c.name)
def test_layers_without_a_prediction_are_linear_in_the_positions(case: Case) -> None:
    module = randomised(case.build(8), 0)
    small, large = (peak_bytes(task(module, torch.randn(1, 8, side, side), "training")) for side in (20, 40))
    assert large < 6 * small
