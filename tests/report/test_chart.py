"""Charts: where values are, what stands at the axes, and that labels do not run into each other."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from polynl.bench.cases import LOOKS
from polynl.blocks.registry import Style
from polynl.report.chart import BOTTOM, DIGIT, HEIGHT, LABEL_LINE, LETTER, TOP, WIDTH, Axis, svg
from polynl.results.charts import Chart, Curve, Series
from polynl.results.formats import number

DOT = Style("#0072B2", "o")
OTHER = Series("another", LOOKS["poly_nl"][0])


def drawn(points: Sequence[tuple[float, float]], **options: object) -> ET.Element:
    lines = [Curve(Series("a line", DOT), points)]
    return ET.fromstring(svg(Chart("title", "x", "y", lines, **options)))  # type: ignore[arg-type]


def texts(picture: ET.Element, anchor: str) -> list[tuple[float, float, str]]:
    """(x, y, text) of the labels of an axis, without its name."""
    found = [e for e in picture.iter("text") if e.get("text-anchor") == anchor and e.get("x")]
    places = [(float(e.get("x", "")), float(e.get("y", "")), e.text or "") for e in found]
    return places[:-1] if anchor == "middle" else places


def markers(picture: ET.Element) -> list[tuple[float, float]]:
    """Where the points are; the marker of a label has no tooltip."""
    points = [e for e in picture.iter("circle") if e.findtext("title")]
    return [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in points]


def test_a_value_is_where_its_tick_is() -> None:
    picture = drawn([(1, 10.0), (2, 20.0), (3, 15.0)])
    ticks = {text: x for x, _, text in texts(picture, "middle")}
    assert list(ticks) == ["1", "2", "3"]
    assert [x for x, _ in markers(picture)] == list(ticks.values())
    heights = {text: y - 4 for _, y, text in texts(picture, "end")}
    assert list(heights) == ["10", "12", "14", "16", "18", "20"]
    first, second, _ = markers(picture)
    assert (first[1], second[1]) == pytest.approx((heights["10"], heights["20"]))
    assert second[1] < first[1], "more is higher"


def test_equal_factors_are_equal_steps_on_a_logarithmic_axis() -> None:
    axis = Axis.over([1, 1000], 0, 300, log=True)
    places = [axis.at(value) for value in (1, 10, 100, 1000)]
    steps = [b - a for a, b in itertools.pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    assert 0 < places[0] < places[-1] < 300


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.001, 0.001], [3.0, 4000.0]])
def test_all_values_are_inside(values: list[float], log: bool) -> None:
    axis = Axis.over(values, BOTTOM, TOP, log=log)
    assert all(TOP < axis.at(value) < BOTTOM for value in values)


def test_one_point() -> None:
    picture = drawn([(1, 70.0)])
    ((x, y),) = markers(picture)
    assert TOP < y < BOTTOM
    assert [text for *_, text in texts(picture, "middle")] == ["1"]
    assert texts(picture, "middle")[0][0] == x


def test_scores_of_zero_have_no_axis_below_zero() -> None:
    axis = Axis.over([0.0, 0.0], BOTTOM, TOP, log=False)
    assert (axis.low, axis.high) == (0.0, 1.0)
    assert Axis.over([1.0, 50.0], 0, 1, log=False).low == 0.0
    assert Axis.over([-1.0, 50.0], 0, 1, log=False).low < -1.0


def test_epochs_have_whole_ticks_and_ratios_have_not() -> None:
    epochs = [text for *_, text in texts(drawn([(1, 0.1), (2, 0.2)]), "middle")]
    assert epochs == ["1", "2"]
    ratios = [text for *_, text in texts(drawn([(1.0, 0.1), (1.4, 0.2)]), "middle")]
    assert ratios == ["1.0", "1.1", "1.2", "1.3", "1.4"]


def test_labels_of_an_axis_have_as_many_decimals() -> None:
    labels = [text for *_, text in texts(drawn([(1, 3.5), (2, 4.9)]), "end")]
    assert labels == ["3.5", "4.0", "4.5"]
    assert "−2" in [text for *_, text in texts(drawn([(1, -3.0), (2, 3.0)]), "end")]


def test_given_ticks_without_a_point_are_on_the_axis() -> None:
    picture = drawn([(1.0, 0.1), (2.0, 0.2)], x_ticks=[1.0, 2.0, 4.0])
    right = float(
        next(e for e in picture.iter("path") if e.get("class") == "axis").get("d", "").split("H")[1]
    )
    assert [text for *_, text in texts(picture, "middle")] == ["1", "2", "4"]
    assert all(x < right for x, *_ in texts(picture, "middle"))


@pytest.mark.parametrize("ends", [(2.6e-11, 8.6e-11), (3e-11, 3.1e-11), (1e-30, 1.5e-30)])
@pytest.mark.parametrize("log", [False, True])
def test_tiny_values_have_labels(ends: tuple[float, float], log: bool) -> None:
    labels = [text for *_, text in texts(drawn([(1, ends[0]), (2, ends[1])], log=(False, log)), "end")]
    assert len(labels) >= 2
    assert all("·10⁻" in label for label in labels), labels


RANGES = [(0.001, 0.0012), (1.0, 1.9), (0.9, 250.0), (3.0, 4e5), (100.0, 101.0), (12345.0, 67890.0)]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("ends", RANGES)
def test_labels_do_not_overlap_and_nothing_is_cut_off(ends: tuple[float, float], log: bool) -> None:
    """Both axes over the same range, whose labels are short or long."""
    picture = drawn([(ends[0], ends[0]), (ends[1], ends[1])], log=(log, log))
    across = texts(picture, "middle")
    assert across
    for (x, _, left), (other, _, right) in itertools.pairwise(across):
        assert other - x > DIGIT * (len(left) + len(right)) / 2, (left, right)
    upwards = sorted(texts(picture, "end"), key=lambda label: label[1])
    assert len(upwards) >= 2
    for (_, y, _), (_, other, _) in itertools.pairwise(upwards):
        assert other - y >= 14
    # To the left of the figures stands the name of the axis, 13 from the edge.
    assert all(x - DIGIT * len(text) > 13 + 5 for x, _, text in upwards)
    assert all(TOP <= y - 4 <= BOTTOM for _, y, _ in upwards)
    assert max(y for _, y, _ in across) < HEIGHT


def test_given_ticks_that_are_too_near_are_left_out() -> None:
    sizes = [float(size) for size in (100, 110, 120, 10_000)]
    picture = drawn([(size, 1.0) for size in sizes], log=(True, False), x_ticks=sizes)
    assert [text for *_, text in texts(picture, "middle")] == ["100", "10,000"]


def test_a_band_spans_the_range_and_a_level_crosses() -> None:
    curve = Curve(Series("a line", DOT), [(1, 2.0), (2, 2.0)], ends=[(1.0, 3.0), (2.0, 2.0)])
    picture = ET.fromstring(svg(Chart("t", "x", "y", [curve], level=2.0)))
    (band,) = (e for e in picture.iter("path") if e.get("class") == "band")
    axis = Axis.over([1.0, 3.0], BOTTOM, TOP, log=False)
    corners = (band.get("d") or "").removeprefix("M").removesuffix(" Z").split(" L")
    assert [float(corner.split(",")[1]) for corner in corners] == [axis.at(v) for v in (3.0, 2.0, 2.0, 1.0)]
    (level,) = (e for e in picture.iter("path") if e.get("class") == "level")
    (axes,) = (e for e in picture.iter("path") if e.get("class") == "axis")
    right = (axes.get("d") or "").partition("H")[2]
    assert f",{axis.at(2.0)} H{right}" in (level.get("d") or "")


def test_seeds_of_a_point_are_a_line() -> None:
    curve = Curve(Series("a line", DOT), [(1.0, 2.0)], ends=[(1.0, 3.0)], joined=False)
    picture = ET.fromstring(svg(Chart("t", "x", "y", [curve])))
    axis = Axis.over([1.0, 3.0], BOTTOM, TOP, log=False)
    shown = [e for e in picture.iter("path") if e.get("class") != "leader"]
    strokes = [e.get("d") or "" for e in shown if "stroke:#0072B2" in (e.get("style") or "")]
    assert [stroke.partition(",")[2] for stroke in strokes] == [f"{axis.at(1.0)} V{axis.at(3.0)}"]


def test_missing_points_are_crosses_above_the_axes_beside_each_other() -> None:
    crosses = [
        e.get("transform") or ""
        for e in drawn([(1, 1.0), (2, 2.0)], missing=[(2, Series("a line", DOT)), (2, OTHER)]).iter("path")
        if "rotate" in (e.get("transform") or "")
    ]
    places = [
        tuple(map(float, cross.partition(")")[0].removeprefix("translate(").split(","))) for cross in crosses
    ]
    assert len(places) == 2
    assert places[0][0] - places[1][0] == 11
    assert all(0 < y < TOP for _, y in places)


@pytest.mark.parametrize("name", LOOKS)
def test_every_style_is_drawn(name: str) -> None:
    style = LOOKS[name][0]
    curve = Curve(Series(name, style, emphasis=True), [(1, 1.0), (2, 2.0)])
    picture = ET.fromstring(svg(Chart("t", "x", "y", [curve])))
    shapes = [e for e in picture.iter() if e.tag in ("path", "circle") and e.get("style")]
    assert len(shapes) == 5, "a line, two points, and the label's line and marker"
    colour = "currentColor" if style.colour == "#000000" else style.colour
    assert all(colour in (shape.get("style") or "") for shape in shapes)


def test_curves_are_labelled_at_their_ends_without_overlaps() -> None:
    """Seven that end in one place, and one far below."""
    names = [*(f"layer {k} (width=64) at stage3" if k % 2 else f"layer {k}" for k in range(7)), "below"]
    curves = [Curve(Series(n, DOT), [(1, 5.0), (2, 1.0 if n == "below" else 9.0)]) for n in names]
    picture = ET.fromstring(svg(Chart("t", "x", "y", curves)))
    labels = texts(picture, "start")
    assert [text for *_, text in labels[:4]] == ["layer 0", "layer 1", "width=64", "at stage3"]
    heights = sorted(y for _, y, _ in labels)
    assert all(b - a >= LABEL_LINE - 0.2 for a, b in itertools.pairwise(heights))
    assert max(heights) == next(y for _, y, text in labels if text == "below")
    assert all(x + LETTER * len(text) <= WIDTH + 1e-6 for x, _, text in labels)
    assert 0 < min(heights) < max(heights) < HEIGHT


def test_curves_of_other_groups_are_faint_and_not_labelled() -> None:
    curves = [Curve(Series("shown", DOT), [(1, 1.0), (2, 2.0)])]
    curves += [Curve(Series("faint", DOT), [(1, 3.0), (2, 4.0)], faint=True)]
    picture = ET.fromstring(svg(Chart("t", "x", "y", curves)))
    assert [text for *_, text in texts(picture, "start")] == ["shown"]
    (line,) = (e for e in picture.iter("path") if e.get("class") == "faint-curve")
    first, *_ = markers(picture)
    assert (line.get("d") or "").startswith(f"M{first[0]},")


def test_text_is_no_markup() -> None:
    picture = svg(Chart("<b>&", "<i>", "</text>", [Curve(Series('"<script>', DOT), [(1, 1.0)])]))
    assert "<script>" not in picture
    root = ET.fromstring(picture)
    assert (root.get("viewBox"), root.find("title").text) == (
        f"0 0 {WIDTH} {HEIGHT}",
        "<b>&: </text> against <i>",
    )  # type: ignore[union-attr]


def test_the_pointer_is_told_a_points_figures() -> None:
    told = [e.text for e in drawn([(196, 2.345)], log=(True, True)).iter("title")]
    assert "a line: 2.35 at 196" in told or "a line: 2.34 at 196" in told


@pytest.mark.parametrize(
    ("value", "text"),
    [(-5.25, "−5.25"), (1e10, "1.0·10¹⁰"), (math.nan, "not a number"), (250.4, "250"), (0.0, "0")],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
