"""Networks small enough to run many times."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from literal_parts import randomised
from torch import Tensor, nn

import polynl
from polynl.insertion import inserted
from polynl.tasks.face_detection.model import face_detector
from polynl.tasks.instance_segmentation.model import mask_rcnn

WIDTH = 4
CLASSES = 5
SEED = 16  # no Grad-CAM is all zero, and the images are of different classes


def classifier(block: str | Callable[..., nn.Module] | None = None, **options: Any) -> nn.Sequential:
    """Maps of half the image's size; in training mode, its dropout and norm would change the output."""
    torch.manual_seed(SEED)
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, WIDTH, 3, stride=2, padding=1))
    model.add_module("norm", randomised(nn.BatchNorm2d(WIDTH)))
    model.add_module("relu", nn.ReLU(inplace=True))
    model.add_module("drop", nn.Dropout(0.5))
    model.add_module("conv", nn.Conv2d(WIDTH, WIDTH, 3, padding=1))
    model.add_module("after", nn.ReLU(inplace=True))
    model.add_module("pool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flat", nn.Flatten())
    model.add_module("head", nn.Linear(WIDTH, CLASSES))
    if block is not None:
        polynl.insert(model, block, before="conv", channels=WIDTH, **options)
    return with_random_blocks(model)


def with_random_blocks(model: Any) -> Any:
    for block in inserted(model).values():
        randomised(block)
    return model


def images(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(3, *size, generator=generator).to(dtype) for size in sizes]


# Each fills only a part of a map, whose size is the larger height and the larger width.
PADDED = [(64, 32), (40, 64)]


def masks(block: str | None = "poly_nl", **options: Any) -> nn.Module:
    """Mask R-CNN that does not resize these images and keeps all detections, whatever their score."""
    torch.manual_seed(0)
    kept = {"box_score_thresh": 0.0, "box_detections_per_img": 5}
    few = {"rpn_pre_nms_top_n_test": 20, "rpn_post_nms_top_n_test": 10}
    return mask_rcnn(
        "resnet18",
        block=block,
        num_classes=4,
        fpn_channels=16,
        box_width=16,
        mask_widths=(8,),
        min_size=64,
        max_size=64,
        detector_options={**kept, **few},
        **options,
    )


def faces() -> nn.Module:
    """A face detector that enlarges images by half, to a longer side of 96."""
    torch.manual_seed(0)
    unsure = {"score_thresh": 0.0, "detections_per_img": 5}
    return face_detector(
        "resnet18", block="poly_nl", fpn_channels=8, min_size=96, max_size=96, detector_options=unsure
    )


def hooked(model: nn.Module) -> dict[str, list[Any]]:
    """The hooks on every module."""
    return {
        name: [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        for name, module in model.named_modules()
    }


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Assert that hooks, training flags, values, gradients and the random state stay the same."""
    before, flags = hooked(model), [module.training for module in model.modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    yield
    assert hooked(model) == before
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def activation_by_hand(
    model: nn.Module, images: Tensor | Sequence[Tensor], name: str
) -> tuple[Tensor, Tensor]:
    """Input and output of a module, in eval mode."""
    kept: list[tuple[Tensor, Tensor]] = []
    handle = model.get_submodule(name).register_forward_hook(
        lambda _, args, output: kept.append((args[0].clone(), output.clone()))
    )
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        model(images)
    handle.remove()
    for module, flag in flags:
        module.training = flag
    return kept[0]
