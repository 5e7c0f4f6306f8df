"""`polynl blocks` and `polynl recipes`: all there is, with costs that were counted."""

import re

import pytest
from command_line import run

import polynl
from polynl.catalogue import counted_cost, description_of
from polynl.train.recipe_file import BUILT_IN

CHANNELS, SIDE = 128, 64


def value(formula: str) -> float:
    """A formula such as 2NC² + C³, for the sizes above."""
    code = re.sub(r"(?<=[\dNC²³])(?=[NC(])", "*", formula).replace("²", "**2").replace("³", "**3")
    return eval(code, {"N": SIDE**2, "C": CHANNELS, "H": SIDE, "W": SIDE})


@pytest.mark.parametrize("name", polynl.BLOCKS)
def test_the_formula_of_the_cost_is_what_is_counted(name: str) -> None:
    assert counted_cost(name, CHANNELS, SIDE)[0] == value(polynl.BLOCKS[name].cost)


def test_what_runs_may_take_less_than_the_formula_as_the_caption_says() -> None:
    assert counted_cost("poly_nl", 256, 56)[0] < 2 * 56**2 * 256**2 + 256**3  # parts of G are mirrored
    assert counted_cost("poly_nl", 64, 7)[0] == 3 * 7**2 * 64**2  # the direct form


def test_all_blocks_are_listed_with_their_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal of the usual width, nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, "blocks", "--channels", "64", "--side", "10")
    costs, _, options = out.partition("Their options")
    costs_of, options_of = (
        {line.split()[0]: line for line in part.splitlines() if line.strip() and line[0] != " "}
        for part in (costs, options)
    )
    assert code == 0
    assert "…" not in out
    assert set(polynl.BLOCKS) <= costs_of.keys()
    assert set(polynl.BLOCKS) <= options_of.keys()
    assert "2NC² + C³" in costs_of["poly_nl"]
    assert "Formulas are for large maps" in costs
    assert "form='auto', reduction=1, window=None" in options_of["poly_nl"]
    assert re.search(r" 409\.6 k +4\.1 k\b", costs_of["conv"]), "100 · 64² and 64²"
    assert re.search(r" 0 +128\b", costs_of["grn"]), "no products; γ and β"


def test_a_map_has_channels_and_positions(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "blocks", "--side", "0")
    assert code == 2
    assert "--side: 0 must be at least 1." in err


def test_all_recipes_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = run(capsys, "recipes")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert code == 0
    assert {path.stem for path in BUILT_IN.glob("*.yaml")} <= rows.keys()
    assert "WIDER FACE as in the Poly-NL paper" in rows["wider_face"]


def test_a_description_fits_on_a_line() -> None:
    for path in BUILT_IN.glob("*.yaml"):
        assert re.fullmatch(r"[A-Z][^#:]{10,85}[^.,]", description_of(path)), path.name
