"""Figures of explanations: maps over images, with colour bars, the networks side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from polynl.explain.capture import Box
from polynl.explain.explanation import Explanation
from polynl.explain.overlay import overlay

# Safe for colour-blind readers: dark to light, and blue over white to orange for signed values.
# Signed maps show their cells, since these are exact.
LEVELS: dict[str, Any] = {"colours": "inferno", "opacity": 0.6}
SIGNED: dict[str, Any] = {
    "colours": LinearSegmentedColormap.from_list("shares", ["#0072B2", "#FFFFFF", "#D55E00"]),
    "opacity": 0.7,
    "lighten": 0.5,
    "nearest": True,
}
# Longer lines of a title are wrapped, since names of networks and folders may have no spaces.
TITLE_WIDTH = 38
PANEL = 3.1  # inches
DPI = 130
MARK = "#00E5FF"


def cam_figure(explanations: Sequence[Explanation]) -> Figure | None:
    """The image and every network's Grad-CAM beside it: Figure 3 of the paper."""
    shown = [explanation for explanation in explanations if explanation.cam is not None]
    if not shown:
        return None
    figure, (axes,) = _grid(1, 1 + len(shown))
    _show_image(axes[0], explanations[0], "image")
    for ax, explanation in zip(axes[1:], shown, strict=True):
        assert explanation.cam is not None
        highest = float(explanation.cam.max())
        # The scale of Grad-CAM has no meaning; a map of zeros stays dark.
        cam = explanation.cam / highest if highest > 0 else explanation.cam
        title = f"{explanation.network.name}\n{explanation.said}"
        colours = _show_map(ax, explanation, cam, title, (0.0, 1.0))
        if explanation.box is not None:
            _outline(ax, explanation.box)
    _add_colour_bar(figure, axes[1:], colours, "Grad-CAM ÷ its maximum")
    return figure


def norms_figure(explanations: Sequence[Explanation]) -> Figure | None:
    """‖X‖, ‖Y‖ and ‖Z‖, a row for every network with a block: Figure 4 of the paper."""
    shown = [explanation for explanation in explanations if explanation.norms is not None]
    if not shown:
        return None
    figure, rows = _grid(len(shown), 4)
    for axes, explanation in zip(rows, shown, strict=True):
        assert explanation.norms is not None
        _show_image(axes[0], explanation, explanation.title)
        titles = ("X, input", "Y, added by the block", "Z, output")
        for ax, values, title in zip(axes[1:], explanation.norms, titles, strict=True):
            high = float(values.max())
            limits = (float(values.min()), high) if high > 0 else (0.0, 1.0)
            colours = _show_map(ax, explanation, values, title if high > 0 else f"{title}: nothing", limits)
            _add_colour_bar(figure, [ax], colours, "norm")
    return figure


def influence_figure(explanations: Sequence[Explanation]) -> Figure | None:
    """How much each position contributes to what the block adds at the marked place."""
    shown = [explanation for explanation in explanations if explanation.shares is not None]
    if not shown:
        return None
    figure, (axes,) = _grid(1, 1 + len(shown))
    # By default every network has a place of its own.
    same = len({explanation.spot for explanation in shown}) == 1
    _show_image(axes[0], shown[0], "image and place" if same else "image")
    if same:
        _mark(axes[0], shown[0])
    for ax, explanation in zip(axes[1:], shown, strict=True):
        assert explanation.shares is not None
        percent = 100 * explanation.shares
        most = float(percent.abs().max()) or 1.0
        meaning = "influence on the marked place" if percent.any() else "its block adds nothing yet"
        title = f"{explanation.title}\n{meaning}"
        colours = _show_map(ax, explanation, percent, title, (-most, most), SIGNED)
        _mark(ax, explanation)
        _add_colour_bar(figure, [ax], colours, "share, %")
    return figure


def _grid(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(PANEL * columns + 0.6, (PANEL + 0.7) * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def _show_image(ax: Axes, explanation: Explanation, title: str) -> None:
    ax.imshow(explanation.image.permute(1, 2, 0).cpu().numpy())
    _set_title(ax, title)


def _show_map(
    ax: Axes,
    explanation: Explanation,
    values: Tensor,
    title: str,
    limits: tuple[float, float],
    style: Mapping[str, Any] = LEVELS,
) -> ScalarMappable:
    """Draw a map over the image; returns the scale of its colours."""
    height, width = explanation.image.shape[-2:]
    # Enough pixels for a smooth map over a small image.
    scale = max(1, -(-round(PANEL * DPI) // max(height, width)))
    size = scale * height, scale * width
    drawn = overlay(explanation.image, values, limits=limits, size=size, **style)
    ax.imshow(drawn.permute(1, 2, 0).numpy(), extent=(-0.5, width - 0.5, height - 0.5, -0.5))
    _set_title(ax, title)
    return ScalarMappable(Normalize(*limits), style["colours"])


def _set_title(ax: Axes, title: str) -> None:
    lines = [textwrap.fill(line, TITLE_WIDTH) for line in title.splitlines()]
    ax.set_title("\n".join(lines), fontsize=10)
    ax.set_xticks([])
    ax.set_yticks([])


def _add_colour_bar(figure: Figure, axes: Sequence[Axes], colours: ScalarMappable, label: str) -> None:
    bar = figure.colorbar(colours, ax=list(axes), shrink=0.8, fraction=0.05, pad=0.02)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _mark(ax: Axes, explanation: Explanation) -> None:
    if explanation.spot is None:
        return
    if len(explanation.spot) == 4:
        _outline(ax, explanation.spot)
        return
    for colour, width in (("black", 4.0), (MARK, 2.0)):
        ax.plot(*explanation.spot, marker="+", markersize=13, markeredgewidth=width, color=colour)


def _outline(ax: Axes, box: Box) -> None:
    left, top, right, bottom = box
    for colour, width in (("black", 3.0), (MARK, 1.5)):
        ax.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=width)
        )


FIGURES: dict[str, Callable[[Sequence[Explanation]], Figure | None]] = {
    "grad_cam": cam_figure,
    "features": norms_figure,
    "influence": influence_figure,
}
