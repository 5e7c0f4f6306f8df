"""A ResNet-50 in int8: how far ONNX Runtime's quantization moves its logits, plain and with a Poly-NL.

    python benchmarks/int8.py WEIGHTS IMAGES [--stride-in-1x1]

WEIGHTS are those of a classifier of 1000 classes with torchvision's names, IMAGES a folder. Of the first 64
images in the order of their names, every other one sets the ranges of the maps, and the rest are compared
with fp32 in PyTorch. The Poly-NL stands before the last block of Res4, with random weights and β = 0.1; see
docs/deploy.md.
"""

import argparse
import logging
import tempfile
from pathlib import Path

import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from torch import Tensor, nn

import polynl
from polynl.data.images import image_files, read_image, val_transform
from polynl.models.resnet import resnet50
from polynl.tasks.classification.config import NormalisedConfig

IMAGES = 64
BETA = 0.1


class Inputs(CalibrationDataReader):
    """One image after the other, as ONNX Runtime asks for them."""

    def __init__(self, images: Tensor) -> None:
        self.images = iter(images)

    def get_next(self) -> dict[str, object] | None:
        """The next input, or None after the last."""
        image = next(self.images, None)
        return None if image is None else {"input": image.unsqueeze(0).numpy()}


def normalised_images(folder: Path) -> Tensor:
    """The first images of a folder as ImageNet's networks see them, (b, 3, 224, 224)."""
    files = image_files([folder])[:IMAGES]
    pixels = torch.stack([val_transform(224, 256)(read_image(file)) for file in files])
    mean, std = (
        torch.tensor(NormalisedConfig.model_fields[key].default)[:, None, None] for key in ("mean", "std")
    )
    return (pixels / 255 - mean) / std


def network(block: str | None, weights: Path, stride_in_1x1: bool) -> nn.Module:
    """The ResNet-50 in eval mode, with a block that changes its output, if any."""
    torch.manual_seed(0)
    model = resnet50(block=block, weights=weights, stride_in_1x1=stride_in_1x1).eval()
    with torch.no_grad():
        for inserted in polynl.inserted(model).values():
            inserted.beta.fill_(BETA)
    return model


def quantized(model: nn.Module, ranges: Tensor, folder: Path) -> tuple[onnxruntime.InferenceSession, str]:
    """The model in int8, and the sizes of its files in fp32 and int8 as cells of the table."""
    whole, small = folder / "model.onnx", folder / "model.int8.onnx"
    polynl.export.to_onnx(model, whole, ranges[:1])
    logging.disable(logging.WARNING)  # it recommends a preprocessing that exported files have had
    quantize_static(whole, small, Inputs(ranges), per_channel=True)
    sizes = " | ".join(f"{file.stat().st_size / 1e6:.0f} MB" for file in (whole, small))
    return onnxruntime.InferenceSession(small), sizes


def main() -> None:
    """Print a row for each network as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument(
        "--stride-in-1x1", action="store_true", help="the weights are those of a ResNet that strides there"
    )
    options = parser.parse_args()
    images = normalised_images(options.images)
    ranges, seen = images[::2], images[1::2]
    print("| ResNet-50 | error of the logits | same class | fp32 | int8 |\n|---|---|---|---|---|")
    for label, block in (("plain", None), ("Poly-NL", "poly_nl")):
        model = network(block, options.weights, options.stride_in_1x1)
        with tempfile.TemporaryDirectory() as folder:
            session, sizes = quantized(model, ranges, Path(folder))
            logits = torch.cat(
                [torch.from_numpy(session.run(None, {"input": x[None].numpy()})[0]) for x in seen]
            )
        with torch.no_grad():
            expected = torch.cat([model(x[None]) for x in seen])
        error = (logits - expected).norm() / expected.norm()
        same = (logits.argmax(1) == expected.argmax(1)).sum()
        print(f"| {label} | {error:.1%} | {same} of {len(seen)} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
