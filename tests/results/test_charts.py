"""Figures of many methods stay legible: a row of charts per family, and labels at the ends of curves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from polynl.bench import plots
from polynl.bench.cases import CASES, LOOKS
from polynl.reproduce.settings import DEFAULT, VARIANTS
from polynl.results.benchmark import Measurement, Point, Results
from polynl.results.charts import Figure, accuracy_and_cost, efficiency, training_curves
from polynl.results.study import Costs, Study, Training, variant_of
from polynl.train.recipe_file import load_recipe

GROUPS = ["Non-local blocks", "Linear attention", "Gates", "Local layers"]


def study(*names: str) -> Study:
    """Invented scores; all end near 99 %, so that labels at the ends have no room."""
    variants = []
    for number, name in enumerate(names):
        block, options = VARIANTS[name]
        words = ["--model.block", block, "--model.options", json.dumps(options), "--epochs", "2"]
        recipe = load_recipe("scenes", words).model_dump(mode="json")
        rows = [
            {"epoch": e, "seconds": 1.0, "loss": 1 / e, "top1": 98.0 + e / 2 + number / 50} for e in (1, 2)
        ]
        costs = Costs(1.0, 1.0, 1.0 + number / 50, 1.0 + number / 20)
        variants.append(variant_of([Training(Path("nowhere"), recipe, 0, rows)], costs))
    return Study("A study", "classification", variants)


@pytest.fixture(scope="module")
def everything() -> Study:
    return study(*VARIANTS)


def labels(figure: Figure) -> list[str]:
    return [series.label for series in figure.legend]


def test_the_papers_blocks_are_drawn_together() -> None:
    figure = training_curves(study(*DEFAULT))
    assert figure.groups() == [figure]


def test_a_score_of_one_epoch_alone_has_no_curve() -> None:
    found = study("none", "poly_nl")
    for variant in found.variants:
        del variant.trainings[0].rows[0]["top1"]
    assert [chart.title for chart in training_curves(found).charts] == ["Training loss"]
    for variant in found.variants:
        del variant.trainings[0].rows[0]
    assert [chart.title for chart in training_curves(found).charts] == ["Top-1", "Training loss"]


def test_many_blocks_are_drawn_by_family(everything: Study) -> None:
    figure = training_curves(everything)
    groups = figure.groups()
    assert [group.title for group in groups] == GROUPS
    assert labels(groups[2]) == ["no block", "Poly-NL", "SE", "GCNet", "GRN"]
    assert {label for group in groups for label in labels(group)} == set(labels(figure))
    for group in groups:
        for chart, whole in zip(group.charts, figure.charts, strict=True):
            assert len(chart.curves) == len(whole.curves), "the others stay for comparison"
            assert [c.series.label for c in chart.curves if not c.faint] == labels(group)


def test_curves_of_a_group_look_different(everything: Study) -> None:
    for group in training_curves(everything).groups():
        colours = [(series.style.colour, series.style.line) for series in group.legend]
        markers = [(series.style.colour, series.style.marker) for series in group.legend]
        assert len(set(colours)) == len(set(markers)) == len(group.legend), group.title


def layers() -> Results:
    """Invented times of all layers, which differ little; TESA's quadratic order stops early."""
    settings = {"batch": 1, "dtype": "float32", "runs": 1, "time_limit_s": 1.0}
    settings |= {"channels": [8, 16], "at_side": 4, "sides": [4, 8, 16], "at_channels": 16}
    machine = {"cpu": "a processor", "threads": 1}
    methods = {case.name: {"label": case.label} for case in CASES}
    results = Results("layers", "polynl bench layers", settings, machine, methods, "conv1x1")
    for side, channels in ((4, 8), (4, 16), (8, 16), (16, 16)):
        for number, method in enumerate(methods):
            point, seconds = Point("forward", 1, side, channels), side**2 * (1 + number / 50)
            missing = "too slow" if method == "tesa_quadratic" and side == 16 else None
            found = Measurement(method, point, () if missing else (seconds,), 1000, missing)
            results.measurements.append(found)
    return results


def test_layers_are_drawn_by_family_and_missing_ones_with_theirs() -> None:
    figure = efficiency(layers(), "forward", LOOKS, absolute=True)
    assert figure is not None
    groups = figure.groups()
    assert [group.title for group in groups] == GROUPS
    missing = [[series.label for _, series in group.charts[1].missing] for group in groups]
    assert missing == [["TESA, quadratic"], [], [], []]
    exponents = {curve.series.label: curve.exponent for curve in groups[0].charts[1].curves}
    assert exponents["Poly-NL"] == pytest.approx(1.0)
    assert {curve.exponent for curve in groups[0].charts[2].curves} == {None}


@pytest.mark.parametrize("kind", ["curves", "accuracy_and_cost", "layers"])
def test_labels_of_drawn_figures_do_not_overlap_and_are_inside(kind: str, everything: Study) -> None:
    if kind == "layers":
        figure = plots.layer_figure(layers(), "forward")
    else:
        described = training_curves(everything) if kind == "curves" else accuracy_and_cost(everything)
        assert described is not None
        figure = plots.drawn(described, "A title")
    renderer = FigureCanvasAgg(figure).get_renderer()
    titles = [text.get_text() for text in figure.texts]
    assert titles[:4] == GROUPS
    count = 0
    for ax in figure.axes:
        boxes = sorted((text.get_window_extent(renderer) for text in ax.texts), key=lambda box: box.y0)
        count += len(boxes)
        assert all(upper.y0 - lower.y1 > -3 for lower, upper in itertools.pairwise(boxes))
        beside = [other.get_position().x0 * figure.bbox.width for other in figure.axes]
        right = min((x for x in beside if x > ax.get_window_extent(renderer).x1), default=figure.bbox.width)
        assert all(box.x1 < right for box in boxes)
    columns = len(figure.axes) // len(GROUPS)
    expected = efficiency(layers(), "forward", LOOKS) if kind == "layers" else training_curves(everything)
    assert expected is not None
    assert count == columns * sum(len(group.legend) for group in expected.groups())


def test_a_line_ends_where_its_label_begins(everything: Study) -> None:
    """Labels are placed by the final scales of the axes."""
    described = accuracy_and_cost(everything)
    assert described is not None
    figure = plots.drawn(described, "A title")
    FigureCanvasAgg(figure).draw()
    ax, chart = figure.axes[0], described.groups()[0].charts[0]
    leaders = [line for line in ax.get_lines() if line.get_linewidth() == 0.6]
    points = [curve.points[-1] for curve in chart.curves if not curve.faint]
    assert len(leaders) == len(points)
    for line, point in zip(leaders, points, strict=True):
        start = line.get_transform().transform(line.get_xydata()[0])
        assert tuple(start) == pytest.approx(tuple(ax.transData.transform(point)), abs=0.5)
