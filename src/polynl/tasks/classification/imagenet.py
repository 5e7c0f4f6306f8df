"""The names of ImageNet's classes, for networks whose labels are its folders or that come without labels."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchvision.models import ResNet50_Weights

# In the order of the sorted names of ImageNet's folders, which are numbers in WordNet.
IMAGENET_NAMES: dict[int, str] = dict(enumerate(ResNet50_Weights.IMAGENET1K_V1.meta["categories"]))
_FOLDER = re.compile(r"n\d{8}")


def with_imagenet_names(labels: Mapping[int, str]) -> dict[int, str]:
    """The labels, in words if they are all of ImageNet's folders, such as n01440764."""
    is_imagenet = len(labels) == len(IMAGENET_NAMES) and all(map(_FOLDER.fullmatch, labels.values()))
    return dict(IMAGENET_NAMES if is_imagenet else labels)
