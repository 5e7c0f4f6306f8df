"""Print what trainings on scenes score on each pair of colours that the two figures may have.

python docs/evidence/colour_pairs.py docs/evidence/scenes-medium/*
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

from polynl.data.scenes import COLOURS, Scenes
from polynl.results.formats import percent
from polynl.results.tables import Table, as_markdown
from polynl.tasks.outcomes import OUTCOMES, Array, Outcomes
from polynl.train.recipe_file import parse_recipe, read_yaml

FIGURES = 2


@cache
def pairs(count: int, size: int, difficulty: str, seed: int) -> tuple[list[str], Array]:
    """The names of the pairs, and the number of each validation scene's pair."""
    scenes = Scenes(count, size=size, difficulty=difficulty, split="val", seed=seed)
    palette = torch.tensor(list(COLOURS.values()))
    drawn = torch.cat([chunk.colours[:, :FIGURES] for chunk in scenes.chunks])
    # Figures are tinted.
    nearest = torch.cdist(drawn, palette).argmin(-1).sort(1)[0]
    found, number = np.unique(nearest.numpy(), axis=0, return_inverse=True)
    names = list(COLOURS)
    return [" and ".join(names[colour] for colour in pair) for pair in found], number.ravel()


def scores(folder: Path) -> dict[str, str]:
    """Top-1 in percent of one training, by pair of colours."""
    data = parse_recipe(read_yaml((folder / "recipe.yaml").read_text()), str(folder)).model_dump()["data"]
    names, number = pairs(data["val_images"], data["size"], data["difficulty"], data["seed"])
    right = Outcomes.load(folder / OUTCOMES).arrays["top1"]
    return {name: percent(100 * right[number == k].mean()) for k, name in enumerate(names)}


if __name__ == "__main__":
    found = {folder: scores(folder) for folder in map(Path, sys.argv[1:])}
    columns = list(dict.fromkeys(name for row in found.values() for name in row))
    rows = [[folder.name, *(row.get(name, "") for name in columns)] for folder, row in found.items()]
    print(as_markdown(Table.flat("Top-1", ["", *columns], rows)))
