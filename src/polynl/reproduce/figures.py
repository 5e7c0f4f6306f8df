"""Pictures of the results: accuracy over epochs, and accuracy against cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polynl.bench.plots import BLACK, STYLES, Style
from polynl.reproduce.results import Outcome
from polynl.results.paper import LABELS


def save_figures(outcomes: Sequence[Outcome], title: str, folder: Path) -> list[Path]:
    """`curves.png` and `accuracy_and_cost.png`; the paths written."""
    paths = []
    with matplotlib.rc_context({"font.size": 12}):
        for name, draw, y_label in (
            ("curves", _curves, "Top-1 on held-out images, %"),
            ("accuracy_and_cost", _against_cost, "Top-1 after the last epoch, %"),
        ):
            figure = Figure(figsize=(8, 5.2), layout="constrained")
            axes = figure.add_subplot()
            draw(axes, outcomes)
            axes.set_ylabel(y_label)
            axes.set_title(title, fontsize=12)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=150)
    return paths


def _style(block: str) -> Style:
    return Style(BLACK, "o") if block == "none" else STYLES[block]


def _curves(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """The mean over seeds after every epoch, and the range of the seeds around it."""
    for outcome in outcomes:
        style, label = _style(outcome.block), LABELS[outcome.block]
        epochs = [row["epoch"] for row in next(iter(outcome.runs.values())) if "top1" in row]
        seeds = [[row["top1"] for row in rows if "top1" in row] for rows in outcome.runs.values()]
        values = list(zip(*seeds, strict=True))
        means, low, high = ([f(v) for v in values] for f in (statistics.mean, min, max))
        axes.plot(epochs, means, style.marker, color=style.colour, linestyle=style.line, label=label)
        axes.fill_between(epochs, low, high, color=style.colour, alpha=0.15)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _against_cost(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """A point for each block, its seeds as a line."""
    plain = outcomes[0].cost.training_seconds
    for outcome in outcomes:
        style, label = _style(outcome.block), LABELS[outcome.block]
        x, values = outcome.cost.training_seconds / plain, outcome.last("top1")
        axes.plot([x, x], [min(values), max(values)], color=style.colour)
        size = 16 if style.marker == "*" else 9
        mean = statistics.mean(values)
        axes.plot(x, mean, style.marker, color=style.colour, markersize=size, linestyle="", label=label)
    axes.set_xlabel("time of a training step ÷ that of the network without a block")
    axes.legend()
