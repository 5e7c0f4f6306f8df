"""Images for the tests of `polynl explain`."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for name, shape in (("a.png", (40, 40, 3)), ("b.jpg", (90, 60, 3))):
        Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)).save(folder / name)
    return folder
