"""Precision–recall curves of an evaluation on WIDER FACE."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.tasks.face_detection.metric import WiderFaceEvaluation

# Okabe and Ito's colours, which colour-blind readers tell apart; the lines differ for prints in grey.
_STYLES = {"easy": ("#009E73", "-"), "medium": ("#0072B2", "--"), "hard": ("#D55E00", "-.")}


def draw_curves(evaluation: WiderFaceEvaluation, path: Path) -> None:
    """Write a PNG with the curve of each subset, and its AP in the legend."""
    if not evaluation.curves:
        raise SettingsError(f"{path} is not drawn: no face counts in any subset, so there are no curves.")
    with matplotlib.rc_context({"font.size": 12}):
        figure = Figure(figsize=(7, 5.6), layout="constrained")
        _draw(figure.add_subplot(), evaluation)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=150)
    write_atomically(path, picture.getbuffer())


def _draw(axes: Axes, evaluation: WiderFaceEvaluation) -> None:
    for subset, (recall, precision) in evaluation.curves.items():
        colour, line = _STYLES[subset]
        label = f"{subset.capitalize()}  AP {evaluation.ap[subset]:.5f}"
        # Markers show a curve of few points, as of a detector whose scores are all equal.
        mark = "o" if len(set(recall.tolist())) < 10 else ""
        axes.plot(recall, precision, line, color=colour, linewidth=2, marker=mark, label=label)
    axes.set(xlim=(0, 1.01), ylim=(0, 1.01), xlabel="recall", ylabel="precision")
    axes.set_title("WIDER FACE, IoU 0.5", fontsize=12)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left")
