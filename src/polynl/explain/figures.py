"""Pictures of what networks look at: maps laid over images, with a colour bar each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from polynl.explain.capture import Box
from polynl.explain.explanation import Answer

# Maps that all eyes tell apart: from dark to light, and from one colour over white to another.
LEVELS = "inferno"
SIGNED = LinearSegmentedColormap.from_list("shares", ["#0072B2", "#FFFFFF", "#D55E00"])
# Of a line of a title, in which names of networks and folders have no place to break.
LETTERS = 38
PANEL = 3.1  # inches
MARK = "#00E5FF"


def cam_figure(answers: Sequence[Answer]) -> Figure | None:
    """The image and the Grad-CAM of every network beside it: Figure 3 of the paper."""
    shown = [answer for answer in answers if answer.cam is not None]
    if not shown:
        return None
    figure, (axes,) = _grid(1, 1 + len(shown))
    _photograph(axes[0], answers[0], "image")
    for ax, answer in zip(axes[1:], shown, strict=True):
        assert answer.cam is not None
        top = float(answer.cam.max())
        # The scale of Grad-CAM means nothing; a map of zeros stays dark.
        cam = answer.cam / top if top > 0 else answer.cam
        _overlaid(ax, answer, cam, f"{answer.subject.name}\n{answer.said}", Normalize(0, 1))
        if answer.box is not None:
            _outline(ax, answer.box)
    _bar(figure, axes[1:], "Grad-CAM ÷ its highest value")
    return figure


def norms_figure(answers: Sequence[Answer]) -> Figure | None:
    """‖X‖, ‖Y‖ and ‖Z‖ of the block of every network that has one, a row for each: Figure 4 of the paper."""
    shown = [answer for answer in answers if answer.norms is not None]
    if not shown:
        return None
    figure, rows = _grid(len(shown), 4)
    for axes, answer in zip(rows, shown, strict=True):
        assert answer.norms is not None
        _photograph(axes[0], answer, answer.title)
        titles = ("X, what comes in", "Y, what the block adds", "Z, what goes out")
        for ax, values, title in zip(axes[1:], answer.norms, titles, strict=True):
            high = float(values.max())
            added = title if high > 0 else f"{title}: nothing"
            _overlaid(ax, answer, values, added, Normalize(float(values.min()) if high > 0 else 0, high or 1))
            _bar(figure, [ax], "norm")
    return figure


def influence_figure(answers: Sequence[Answer]) -> Figure | None:
    """Who contributes to what the block adds at the marked place, for every network that can say."""
    shown = [answer for answer in answers if answer.shares is not None]
    if not shown:
        return None
    figure, (axes,) = _grid(1, 1 + len(shown))
    # Without a position that is asked for, every network may have another.
    same = len({answer.spot for answer in shown}) == 1
    _photograph(axes[0], shown[0], "image and place" if same else "image")
    if same:
        _mark(axes[0], shown[0])
    for ax, answer in zip(axes[1:], shown, strict=True):
        assert answer.shares is not None
        percent = 100 * answer.shares
        most = float(percent.abs().max()) or 1.0
        said = "where its block's addition comes from" if percent.any() else "its block adds nothing yet"
        title = f"{answer.title}\n{said}"
        _overlaid(ax, answer, percent, title, Normalize(-most, most), signed=True)
        _mark(ax, answer)
        _bar(figure, [ax], "share, %")
    return figure


def _grid(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(PANEL * columns + 0.6, (PANEL + 0.7) * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def _photograph(ax: Axes, answer: Answer, title: str) -> None:
    ax.imshow(answer.picture.permute(1, 2, 0).cpu().numpy())
    _finish(ax, title)


def _overlaid(
    ax: Axes, answer: Answer, values: Tensor, title: str, limits: Normalize, *, signed: bool = False
) -> None:
    """A map over the image in grey; signed ones show their cells, since these are exact."""
    height, width = answer.picture.shape[-2:]
    grey = answer.picture.float().mean(dim=0).cpu().numpy()
    ax.imshow(0.5 * grey + 127 if signed else grey, cmap="gray", vmin=0, vmax=255)
    ax.imshow(
        values.float().cpu().numpy(),
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        cmap=SIGNED if signed else LEVELS,
        norm=limits,
        alpha=0.7 if signed else 0.6,
        interpolation="nearest" if signed else "bilinear",
    )
    _finish(ax, title)


def _finish(ax: Axes, title: str) -> None:
    lines = [textwrap.fill(line, LETTERS) for line in title.splitlines()]
    ax.set_title("\n".join(lines), fontsize=10)
    ax.set_xticks([])
    ax.set_yticks([])


def _bar(figure: Figure, axes: Sequence[Axes], label: str) -> None:
    bar = figure.colorbar(axes[0].images[-1], ax=list(axes), shrink=0.8, fraction=0.05, pad=0.02)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    # The colours of the bar are those of the picture's transparent map, made opaque.
    if bar.solids is not None:
        bar.solids.set_alpha(1)


def _mark(ax: Axes, answer: Answer) -> None:
    if answer.spot is None:
        return
    if len(answer.spot) == 4:
        _outline(ax, answer.spot)
        return
    for colour, width in (("black", 4.0), (MARK, 2.0)):
        ax.plot(*answer.spot, marker="+", markersize=13, markeredgewidth=width, color=colour)


def _outline(ax: Axes, box: Box) -> None:
    left, top, right, bottom = box
    for colour, width in (("black", 3.0), (MARK, 1.5)):
        ax.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=width)
        )


FIGURES: dict[str, Callable[[Sequence[Answer]], Figure | None]] = {
    "grad_cam": cam_figure,
    "features": norms_figure,
    "influence": influence_figure,
}
