"""Keep the padding of a detector's batches out of its blocks, and out of its convolutions.

A detector of torchvision resizes the images of a batch, pads them on the right and at the bottom to one size,
and runs its network on that. A hook on its `transform` notes the sizes of the images, hooks on the modules
inside use them, and one on the detector forgets them when it has finished.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polynl.blocks.base import Block, layers_of_blocks
from polynl.insertion.places import check_model

Detector = TypeVar("Detector", bound=nn.Module)
HANDLES = "polynl_padding_handles"
# What is inside sees maps of boxes, cut out of the images.
WITHOUT_PADDING = "roi_heads"
MIXES_POSITIONS = (
    nn.ConvTranspose2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.GroupNorm,
    nn.InstanceNorm2d,
    nn.MultiheadAttention,
)


def ignore_padding(detector: Detector, *, everywhere: bool = False, enabled: bool = True) -> Detector:
    """Let the blocks of a torchvision detector ignore the padding of its batches; return the detector.

    Every block gets a mask of the positions that belong to the images: those that an image would have without
    padding, which are ⌈h/s⌉ × ⌈w/s⌉ for h × w pixels, after resizing, at stride s. Call this when all blocks
    are inserted. `enabled=False` undoes it, and so does `polynl.remove`.

    Convolutions also see the padding, near the border. With `everywhere`, they and max pooling see zeros or
    nothing there, as at the border of an image, so that features do not depend on the rest of the batch. This
    changes the output of the host for padded images.

    >>> import torchvision
    >>> from polynl import insert
    >>> build = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    >>> model = build(weights=None, weights_backbone=None)
    >>> model = ignore_padding(insert(model, "poly_nl", before="backbone.body.16", channels=160))
    """
    check_model(detector)
    if not enabled:
        return heed_padding(detector)
    transform = getattr(detector, "transform", None)
    if not isinstance(transform, nn.Module):
        raise ValueError(
            f"{type(detector).__name__} is not a detector of torchvision: it has no module transform, which "
            "pads images. Pass the detector itself, before it is wrapped"
        )
    if not everywhere and not any(isinstance(module, Block) for module in detector.modules()):
        raise ValueError("there is no block to ignore padding: insert one first, or pass everywhere=True")
    modules = dict(_on_images(detector))
    _check(modules, everywhere)
    heed_padding(detector)
    batch = _PaddedBatch()
    _keep(detector, detector.register_forward_hook(batch.forget, always_call=True))
    _keep(transform, transform.register_forward_hook(batch.note))
    for module in modules.values():
        if isinstance(module, Block):
            _keep(module, module.register_forward_pre_hook(batch.pass_mask, with_kwargs=True))
        elif everywhere and isinstance(module, nn.MaxPool2d):
            _keep(module, module.register_forward_pre_hook(batch.leave_out))
            _keep(module, module.register_forward_hook(batch.clear_output))
        elif everywhere and isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1:
            _keep(module, module.register_forward_pre_hook(batch.clear))
    return detector


def heed_padding(model: Detector) -> Detector:
    """Remove the hooks of `ignore_padding`, if any."""
    for module in model.modules():
        for handle in vars(module).pop(HANDLES, ()):
            handle.remove()
    return model


def _keep(module: nn.Module, handle: RemovableHandle) -> None:
    """Keep the handle on the module: see `attach` in hooks.py."""
    vars(module).setdefault(HANDLES, []).append(handle)


def _on_images(detector: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules, by name, whose maps are of whole images."""
    inside = layers_of_blocks(detector)
    for name, module in detector.named_modules():
        if name.partition(".")[0] != WITHOUT_PADDING and module not in inside:
            yield name, module


def _check(modules: dict[str, nn.Module], everywhere: bool) -> None:
    for name, module in modules.items():
        kind = type(module).__name__
        if isinstance(module, Block) and not module.takes_masks:
            raise ValueError(f"{name} cannot ignore padding: {kind} takes no mask")
        if everywhere and isinstance(module, MIXES_POSITIONS):
            raise ValueError(
                f"{name} cannot ignore padding: only blocks, Conv2d and MaxPool2d can, and it is {kind}; "
                "without everywhere=True, blocks alone do"
            )


class _PaddedBatch(threading.local):
    """The batch that a detector is working on, and the hooks that use it; every thread has its own."""

    padded: tuple[int, int] | None = None
    """Height and width of the batch; None if there is no padding, or if the detector is not running."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Those of every image in it."""

    def __init__(self) -> None:
        self.masks: dict[Any, Tensor] = {}

    def __reduce__(self) -> tuple[type[_PaddedBatch], tuple[()]]:
        """Copies and pickles of a detector are not working on a batch."""
        return _PaddedBatch, ()

    def note(self, transform: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the detector's transform."""
        padded, sizes = tuple(output[0].tensors.shape[-2:]), tuple(map(tuple, output[0].image_sizes))
        self.masks.clear()
        self.padded, self.sizes = None if set(sizes) == {padded} else padded, sizes

    def forget(self, detector: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the detector: parts of it may also be called by themselves."""
        self.padded = None
        self.masks.clear()

    def pass_mask(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of a block; a mask or context that the caller passes stays."""
        if self.padded is not None and len(args) == 1 and not kwargs:
            return args, {"mask": self._real(args[0])}
        return None

    def clear(self, conv: nn.Module, args: tuple[Tensor, ...]) -> Tensor | None:
        """A forward pre-hook of a convolution: zeros in the padding."""
        return None if self.padded is None else self._filled(args[0], 0.0)

    def leave_out(self, pool: nn.Module, args: tuple[Tensor, ...]) -> Tensor | None:
        """A forward pre-hook of max pooling: nothing in the padding."""
        return None if self.padded is None else self._filled(args[0], -torch.inf)

    def clear_output(self, pool: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """A forward hook of max pooling: zeros where it saw nothing but padding."""
        return None if self.padded is None else self._filled(output, 0.0)

    def _filled(self, x: Tensor, value: float) -> Tensor:
        return x.masked_fill(~self._real(x).unsqueeze(1), value)

    def _real(self, x: Tensor) -> Tensor:
        key = x.shape[2:], x.device
        if key not in self.masks:
            assert self.padded is not None
            self.masks[key] = real_positions(x, self.padded, self.sizes)
        return self.masks[key]


def real_positions(x: Tensor, padded: tuple[int, int], sizes: tuple[tuple[int, int], ...]) -> Tensor:
    """The mask (b, h, w) of the positions of x, a map of padded images, that belong to the images."""
    if x.dim() != 4:
        raise ValueError(f"to ignore padding, a block needs a map (b, c, h, w); got shape {tuple(x.shape)}")
    inside = []
    for axis, length in enumerate(x.shape[2:]):
        covered = [_covered(size[axis], padded[axis], length) for size in sizes]
        inside.append(torch.arange(length, device=x.device) < torch.tensor(covered, device=x.device)[:, None])
    return inside[0].unsqueeze(2) & inside[1].unsqueeze(1)


def _covered(size: int, padded: int, length: int) -> int:
    """How many positions of an axis belong to an image: ⌈size/stride⌉.

    The stride is a power of two if one explains the length, otherwise the quotient. So 13 positions for 800
    pixels have the stride 64, and an image has as many positions in every batch.
    """
    stride = 1 << (-(-padded // length) - 1).bit_length()
    if -(-padded // stride) == length:
        return -(-size // stride)
    return -(-size * length // padded)
