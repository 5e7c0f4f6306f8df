"""The classifier of any network: which layers it consists of, and whether its output is logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polynl.models.libraries import Builder, without_memory


def heads_of(build: Builder) -> list[str]:
    """The layers whose number of outputs is `num_classes`, found by building the network for two numbers."""
    one, other = (_shapes(build, classes) for classes in (2, 3))
    return [
        key.removesuffix(".weight")
        for key, shape in one.items()
        if key.endswith(".weight") and other.get(key) != shape
    ]


def _shapes(build: Builder, classes: int) -> dict[str, torch.Size]:
    state = without_memory(lambda: build(num_classes=classes)).state_dict()
    return {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}


def check_logits(model: nn.Module, classes: int, side: int, name: str) -> None:
    """Raise a ValueError unless the model turns images of this side into logits, also in training."""
    images = torch.zeros(2, 3, side, side)
    for mode in (True, False):
        try:
            output = model.train(mode)(images)
        except Exception as error:  # networks raise anything for images that they do not take
            if images.is_meta and "meta" in str(error).lower():
                raise
            reason = str(error).rstrip(".! ") or repr(error)
            raise ValueError(
                f"{name} cannot classify images of {side} × {side}: {reason}. "
                "Choose another data.size, or an option of the network such as arch_options: {img_size: …}"
            ) from error
        if not isinstance(output, Tensor) or output.shape != (2, classes):
            when = "in training" if mode else "in scoring"
            remedy = (
                "; some have an option, such as aux_logits, that leaves out other outputs" if mode else ""
            )
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"{name} is not a classifier of {classes} classes: for 2 images it returns {got} {when}; "
                f"expected logits, (2, {classes}){remedy}"
            )
