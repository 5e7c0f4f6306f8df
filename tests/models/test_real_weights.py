"""A trained network stays what it was: real ImageNet weights, real images, blocks at every placement.

Needs a folder named by POLYNL_DATA with `resnet50-imagenet` (torchvision's keys, the stride on the 1×1
convolution, `labels.json`) and `imagenet-samples` (one image per class, named wnid_label).
"""

import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from polynl import inserted
from polynl.models.resnet import resnet50

DATA = os.environ.get("POLYNL_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with weights and images")


def test_a_trained_resnet50_sees_the_same_with_blocks_in_it() -> None:
    folder = Path(str(DATA))
    weights = next((folder / "resnet50-imagenet").glob("*.pth"))
    labels = json.loads((folder / "resnet50-imagenet" / "labels.json").read_text())
    files = sorted((folder / "imagenet-samples").glob("*.JPEG"))[::12]
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(256, antialias=True),
            v2.CenterCrop(224),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    images = torch.stack([transform(Image.open(f).convert("RGB")) for f in files])
    plain = resnet50(weights=weights, stride_in_1x1=True).eval()
    with_blocks = resnet50(block="poly_nl", placement="res345", weights=weights, stride_in_1x1=True).eval()
    assert len(inserted(with_blocks)) == 3
    with torch.no_grad():
        logits = plain(images)
        assert torch.equal(with_blocks(images), logits)
    guesses = [labels[str(i)].lower() for i in logits.argmax(dim=1).tolist()]
    right = sum(f.stem.partition("_")[2].lower() in guess for f, guess in zip(files, guesses, strict=True))
    assert right >= 6, dict(zip([f.stem for f in files], guesses, strict=True))
