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

from polynl.explain.capture import Spot
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
    shown = [(each, each.cam) for each in explanations if each.cam is not None]
    if not shown:
        return None
    figure, (axes,) = _grid(1, 1 + len(shown))
    _show_image(axes[0], explanations[0], "image")
    for ax, (explanation, cam) in zip(axes[1:], shown, strict=True):
        # The scale of Grad-CAM has no meaning; a map of zeros stays dark.
        relative = cam / (float(cam.max()) or 1.0)
        title = f"{explanation.network.name}\n{explanation.said}"
        colours = _show_map(ax, explanation, relative, title, (0.0, 1.0))
        _mark(ax, explanation.box)
    _add_colour_bar(figure, axes[1:], colours, "Grad-CAM ÷ its maximum")
    return figure


def norms_figure(explanations: Sequence[Explanation]) -> Figure | None:
    """‖X‖, ‖Y‖ and ‖Z‖, a row for every network with a block: Figure 4 of the paper.

    Each has its own scale, or a small Y could not be seen; its title says how it compares with X.
    """
    shown = [(each, each.norms) for each in explanations if each.norms is not None]
    if not shown:
        return None
    figure, rows = _grid(len(shown), 4)
    for axes, (explanation, norms) in zip(rows, shown, strict=True):
        _show_image(axes[0], explanation, explanation.title)
        titles = ("X, input", f"Y, added by the block\n{explanation.added}", "Z, output")
        for ax, values, title in zip(axes[1:], norms, titles, strict=True):
            high = float(values.max())
            limits = (float(values.min()), high) if high > 0 else (0.0, 1.0)
            colours = _show_map(ax, explanation, values, title, limits)
            _add_colour_bar(figure, [ax], colours, "norm")
    return figure


def influence_figure(explanations: Sequence[Explanation]) -> Figure | None:
    """How much each position contributes to what the block adds at the marked place."""
    shown = [(each, each.shares) for each in explanations if each.shares is not None]
    if not shown:
        return None
    figure, (axes,) = _grid(1, 1 + len(shown))
    # By default every network has a place of its own.
    spots = {explanation.spot for explanation, _ in shown}
    _show_image(axes[0], shown[0][0], "image and place" if len(spots) == 1 else "image")
    if len(spots) == 1:
        _mark(axes[0], *spots)
    for ax, (explanation, shares) in zip(axes[1:], shown, strict=True):
        percent = 100 * shares
        most = float(percent.abs().max()) or 1.0
        title = f"{explanation.title}\n{_influence_title(explanation)}"
        colours = _show_map(ax, explanation, percent, title, (-most, most), SIGNED)
        _mark(ax, explanation.spot)
        _add_colour_bar(figure, [ax], colours, "share, %")
    return figure


def _influence_title(explanation: Explanation) -> str:
    """Poly-NL has shares before β has moved from zero: those of what it would add."""
    assert explanation.shares is not None
    if not explanation.shares.any():
        return "its block adds nothing yet"
    trained = explanation.norms is None or bool(explanation.norms.y.any())
    return "influence on the marked place" if trained else "untrained: what its block would add"


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


def _mark(ax: Axes, spot: Spot | None) -> None:
    """A cross at a point, or the outline of a box."""
    for colour, width in (("black", 2.0), (MARK, 1.0)):
        if spot is not None and len(spot) == 2:
            ax.plot(*spot, marker="+", markersize=13, markeredgewidth=2 * width, color=colour)
        elif spot is not None:
            left, top, right, bottom = spot
            corner, size = (left, top), (right - left, bottom - top)
            ax.add_patch(Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=1.5 * width))


FIGURES: dict[str, Callable[[Sequence[Explanation]], Figure | None]] = {
    "grad_cam": cam_figure,
    "features": norms_figure,
    "influence": influence_figure,
}
