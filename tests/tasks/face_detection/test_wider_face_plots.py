"""The picture of the curves: that it is there, and says what was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from polynl.errors import SettingsError
from polynl.tasks.face_detection.curves import _draw, draw_curves
from polynl.tasks.face_detection.metric import WiderFaceEvaluation

RECALL = np.linspace(0, 0.9, 1000)
CURVES = {"easy": (RECALL, 1 - RECALL**4), "medium": (RECALL, 1 - RECALL**2), "hard": (RECALL, 1 - RECALL)}
EVALUATION = WiderFaceEvaluation({"easy": 0.963714, "medium": 0.95, "hard": 0.5}, CURVES)


def test_a_picture_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "below" / "curves.png"
    draw_curves(EVALUATION, path)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 600
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for colour in ((0, 158, 115), (0, 114, 178), (213, 94, 0)):
        assert (pixels == colour).all(1).sum() > 500
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


def test_the_curves_and_their_ap_are_there() -> None:
    axes = Figure().add_subplot()
    _draw(axes, EVALUATION)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "Easy  AP 0.96371",
        "Medium  AP 0.95000",
        "Hard  AP 0.50000",
    ]
    for line, (recall, precision) in zip(axes.get_lines(), CURVES.values(), strict=True):
        assert np.array_equal(line.get_xdata(), recall)
        assert np.array_equal(line.get_ydata(), precision)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision")


def test_a_single_point_and_an_empty_curve_are_drawn(tmp_path: Path) -> None:
    one, none = np.ones(1000), np.zeros(0)
    evaluation = WiderFaceEvaluation({"easy": 1.0, "hard": 0.0}, {"easy": (one, one), "hard": (none, none)})
    axes = Figure().add_subplot()
    _draw(axes, evaluation)
    assert [line.get_marker() for line in axes.get_lines()] == ["o", "o"]
    draw_curves(evaluation, tmp_path / "curves.png")


def test_without_curves_there_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"curves\.png is not drawn: no face counts in any subset"):
        draw_curves(WiderFaceEvaluation({}, {}), tmp_path / "curves.png")
