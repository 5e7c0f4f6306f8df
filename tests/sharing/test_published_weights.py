"""Real weights whose shapes do not tell where the stride is: saved with it, they do not load without.

Needs a folder named by POLYNL_DATA with `resnet50-imagenet` (torchvision's keys, the stride on the 1×1
convolution, `labels.json`) and `imagenet-samples` (one image per class, named wnid_label).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import polynl
from polynl.errors import SettingsError

DATA = os.environ.get("POLYNL_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with weights and images")
PLAIN = ["--model.block", "none", "--data.root", "none"]


def test_a_forgotten_stride_is_no_longer_silent(tmp_path: Path) -> None:
    folder = Path(str(DATA), "resnet50-imagenet")
    (image,) = Path(str(DATA), "imagenet-samples").glob("*_brambling.JPEG")
    weights, labels = next(folder.glob("*.pth")), folder / "labels.json"
    right, wrong = (
        polynl.load_run(weights, recipe="imagenet", overrides=[*PLAIN, *stride], labels=labels)
        for stride in (["--model.stride-in-1x1", "true"], [])
    )
    (seen,), (seen_wrong,) = right.predict(image, top=1), wrong.predict(image, top=1)
    assert seen.name == "brambling"
    assert seen.probability > 0.9 > 0.5 > seen_wrong.probability
    right.save_pretrained(tmp_path / "shared")
    with pytest.raises(SettingsError, match=r"though all shapes agree: layer2\.0\.conv1\.stride"):
        polynl.load_run(tmp_path / "shared" / "model.safetensors", recipe="imagenet", overrides=PLAIN)
    assert polynl.from_pretrained(tmp_path / "shared").predict(image, top=1) == [seen]
