"""The open axes of an exported program, and the shapes that it is tried at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polynl.errors import check_choices

# By the axis of the input (b, c, *spatial).
AXES = {"batch": 0, "depth": -3, "height": -2, "width": -1}
Dynamic = Sequence[str] | Mapping[str, int | None]
"""Names of open axes; a mapping also gives the largest size of each, or None."""
Open = dict[int, int | None]
"""The largest size by axis."""


def open_axes(dynamic: Dynamic, example: Tensor) -> Open:
    """The axes by number with the largest size of each; an error names one that is not there.

    >>> open_axes({"batch": 8, "width": None}, torch.zeros(2, 3, 32, 32))
    {0: 8, 3: None}
    """
    if isinstance(dynamic, str):
        raise TypeError(f"dynamic={dynamic!r}: expected a sequence of names, such as ({dynamic!r},)")
    limits = dict(dynamic) if isinstance(dynamic, Mapping) else dict.fromkeys(dynamic)
    found: Open = {}
    for name in check_choices(limits, list(AXES), "axis"):
        axis, most = AXES[name] % max(example.dim(), 1), limits[name]
        if example.dim() < (1 if name == "batch" else 2 - AXES[name]):
            raise ValueError(
                f"dynamic: {name}: the example has shape {tuple(example.shape)}, without this axis"
            )
        if most is not None and most < example.shape[axis]:
            raise ValueError(
                f"dynamic: {name}: at most {most}, but the example of shape {tuple(example.shape)} is larger"
            )
        if most == 1:
            raise ValueError(f"dynamic: {name}: at most 1 is a fixed size; leave it out")
        found[axis] = most
    return found


def with_limits(axes: Open, example: Tensor) -> Open:
    """For runtimes that plan their memory: twice the example if no largest size is given, and 8 images."""
    return {
        axis: max(2 * example.shape[axis], 8 if axis == 0 else 0) if most is None else most
        for axis, most in axes.items()
    }


def traceable(example: Tensor, axes: Open) -> Tensor:
    """The example, twice if it is one image and their number is open: torch would take one as fixed."""
    return torch.cat([example, example]) if 0 in axes and example.shape[0] == 1 else example


def dynamic_shapes(axes: Open) -> dict[int, Any]:
    """As torch.export takes them."""
    return {axis: torch.export.Dim.DYNAMIC(max=most) for axis, most in axes.items()}


def three_shapes(example: Tensor, axes: Open) -> list[tuple[int, ...]]:
    """That of the example, and one on either side of it; where an axis is longer, the next one is shorter.

    >>> three_shapes(torch.zeros(2, 3, 40, 40), {0: None, 2: None, 3: None})
    [(1, 3, 50, 30), (2, 3, 40, 40), (3, 3, 30, 50)]
    >>> three_shapes(torch.zeros(1, 3, 40, 40), {0: None})
    [(3, 3, 40, 40), (1, 3, 40, 40), (2, 3, 40, 40)]
    """
    shape = tuple(example.shape)
    smaller_first, larger_first = list(shape), list(shape)
    for axis, most in axes.items():
        step = 1 if axis == 0 else max(1, shape[axis] // 4)
        more, beyond = (
            s if most is None else min(most, s) for s in (shape[axis] + step, shape[axis] + 2 * step)
        )
        less = shape[axis] - step if shape[axis] > step else beyond
        first, last = (less, more) if axis in (0, len(shape) - 1) else (more, less)
        smaller_first[axis], larger_first[axis] = first, last
    return [tuple(smaller_first), shape, tuple(larger_first)]


def three_inputs(example: Tensor, axes: Open) -> list[Tensor]:
    """The example, and two inputs of other shapes, whose values are drawn from those of the example."""
    generator = torch.Generator().manual_seed(0)
    values = example.flatten()
    if example.is_floating_point() and bool((values == values[:1]).all()):
        values = torch.randn(4096, generator=generator).to(example.dtype)  # a constant image shows little
    first, _, last = three_shapes(example, axes)
    drawn = [values[torch.randint(len(values), shape, generator=generator)] for shape in (first, last)]
    return [drawn[0], example, drawn[1]]
