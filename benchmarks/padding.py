"""How far a detector's features move when an image is batched with another, with and without the padding.

    python benchmarks/padding.py A.jpg B.jpg --weights resnet50.pth

Mask R-CNN's ResNet-50 with ImageNet weights sees each image alone, and both in one batch. The table has the
relative change of the features after Res4, at all positions of an image and at those far from its right and
lower border (the first half of both axes), for Poly-NL with β such that its branch is so many times X.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, read_image

from polynl import ignore_padding, inserted
from polynl.tasks.instance_segmentation.model import mask_rcnn

STRIDE = 16
MODES: dict[str, dict[str, bool]] = {
    "block sees padding": {"enabled": False},
    "block ignores padding": {},
    "everywhere": {"everywhere": True},
}


def features(model: Any, images: list[Tensor]) -> tuple[Tensor, Any]:
    """After Res4, and the padded batch."""
    batch, _ = model.transform(images)
    return model.backbone.body(batch.tensors)["2"], batch


def moved(model: Any, images: list[Tensor]) -> list[str]:
    """For each image, the change at all positions and far from the border."""
    together, padded = features(model, images)
    cells = []
    for number, image in enumerate(images):
        alone, batch = features(model, [image])
        height, width = (-(-side // STRIDE) for side in batch.image_sizes[0])
        pair = alone[0, :, :height, :width], together[number, :, :height, :width]
        all_over, far = (
            (b - a).norm() / a.norm()
            for a, b in (pair, [map[:, : height // 2, : width // 2] for map in pair])
        )
        filled = height * width / (padded.tensors.shape[-2:].numel() / STRIDE**2)
        cells.append(f"{1 - filled:.0%} padding: {all_over:.2%} all over, {far:.1e} far from the border")
    return cells


def scale_branch(model: Any, image: Tensor, ratio: float) -> None:
    """Set β so that ‖βY‖ = ratio · ‖X‖ for the image alone."""
    (block,) = inserted(model).values()
    seen: list[Tensor] = []
    with block.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        block.beta.fill_(0.0)  # type: ignore[operator,union-attr]
        features(model, [image])
    x = seen[0]
    block.beta.fill_(1.0)  # type: ignore[operator,union-attr]
    block.beta.fill_(ratio * x.norm() / (block(x) - x).norm())  # type: ignore[operator,union-attr]


@torch.no_grad()
def main() -> None:
    """Print the changes for every mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("images", nargs=2, type=Path)
    parser.add_argument("--weights", type=Path, required=True, help="of a ResNet-50")
    parser.add_argument("--stride-in-1x1", action="store_true", help="the weights were trained that way")
    parser.add_argument("--size", type=int, default=480, help="shorter side of the images")
    options = parser.parse_args()
    images = [read_image(str(path), ImageReadMode.RGB).float() / 255 for path in options.images]
    keys: dict[str, Any] = {
        "backbone_weights": options.weights,
        "stride_in_1x1": options.stride_in_1x1,
        "min_size": options.size,
    }
    torch.manual_seed(0)
    print("no block:", *moved(mask_rcnn(**keys).eval(), images), sep="\n  ")
    model = mask_rcnn(block="poly_nl", **keys).eval()
    for ratio in (0.27, 0.5):
        ignore_padding(model, enabled=False)
        scale_branch(model, images[0], ratio)
        for name, mode in MODES.items():
            print(
                f"{ratio} X, {name}:", *moved(ignore_padding(model, **mode), images), sep="\n  ", flush=True
            )


if __name__ == "__main__":
    main()
