"""The main job runs, and its tables hold what they promise."""

import pytest

from polynl import demo


def test_demo_prints_both_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "RUNS", 2)
    monkeypatch.setattr(demo, "CHANNELS", 16)
    demo.main()
    printed = capsys.readouterr().out
    for name in demo.polynl.BLOCKS:
        assert printed.count(name) >= 2, name


def test_training_learns_and_starts_from_the_same_network() -> None:
    plain, with_block = demo.trained_losses(None, {}), demo.trained_losses("poly_nl", {})
    assert plain[0] == with_block[0]
    assert plain[-1] < plain[0] / 2
    assert with_block[-1] < with_block[0] / 2
    assert plain[1:] != with_block[1:]


def test_costs_are_those_of_the_blocks() -> None:
    conv, poly_nl = demo.measured_costs([("conv", {}), ("poly_nl", {"form": "direct"})])
    n, c = demo.SIDE**2, demo.CHANNELS
    assert conv.parameters == c**2
    assert conv.multiply_adds == n * c**2
    assert poly_nl.parameters == 3 * c**2 + 2
    assert poly_nl.multiply_adds == 3 * n * c**2
    assert min(conv.seconds, poly_nl.seconds) > 0
