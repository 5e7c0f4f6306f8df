"""What a run writes about its network into files of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import nn

from polynl.models.about import About, structure_of
from polynl.tasks.base import Task
from polynl.train.config import Recipe, neutral_fields

# In place of a path.
NOWHERE = "data"


def about_run(recipe: Recipe, task: Task, model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> About:
    """What is known of a model in training; `rows` are its metrics, one per epoch."""
    row = rows[-1] if rows else {}
    scores = {name: row[name] for name in task.scores if name in row}
    return About(structure_of(model), portable(recipe), task.labels(), scores, row.get("epoch"))


def portable(config: BaseModel) -> dict[str, Any]:
    """The keys that affect results, as JSON has them; of paths only the last part.

    Files of weights are given to others, and are the same wherever the data is and however it is read.
    """
    keys = config.model_dump(mode="json", exclude=neutral_fields(type(config)))
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            keys[name] = portable(value)
        elif name not in keys and field.is_required():  # the folder of a data set
            keys[name] = NOWHERE
        elif isinstance(value, Path):
            keys[name] = value.name
    return keys
