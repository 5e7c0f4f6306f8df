"""Shared by the tests of training: a tiny recipe and a folder of small images."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from rich.console import Console

from polynl.train.config import Recipe
from polynl.train.recipe_file import load_recipe

TINY = Path(__file__).with_name("tiny.yaml")
SILENT = Console(quiet=True)


def tiny(*overrides: str) -> Recipe:
    """The recipe in tiny.yaml, keys replaced as on the command line."""
    return load_recipe(TINY, overrides)


def image_folder(root: Path, classes: int, images: int = 2, side: int = 20) -> Path:
    """<root>/{train,val}/<class>/*.png with random pixels."""
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for number in range(classes):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for image in range(images):
                pixels = torch.randint(256, (side, side, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray(pixels.numpy()).save(folder / f"{image}.png")
    return root
