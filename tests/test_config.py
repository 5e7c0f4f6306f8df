"""Configs: a key is described once, and a mistake in Python reads as one in a recipe does."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

from polynl.config import Config, Width, check_arguments, configured, errors_at
from polynl.errors import SettingsError
from polynl.tasks.registry import TASKS, task_class


class Wide(Config):
    width: Width = 8
    """Channels."""
    depth: int
    """Layers."""


class Narrow(Wide):
    width: Width = 2
    depth: int = 1
    """Layers, few."""


def test_a_key_that_is_declared_again_keeps_its_description_unless_it_has_one() -> None:
    descriptions = {key: field.description for key, field in Narrow.model_fields.items()}
    assert descriptions == {"width": "Channels.", "depth": "Layers, few."}
    assert Narrow() == Narrow(width=2, depth=1)


@pytest.mark.parametrize("task", TASKS)
def test_every_key_of_a_task_is_described(task: str) -> None:
    def undescribed(config: type[Config], path: str = "") -> list[str]:
        found = []
        for key, field in config.model_fields.items():
            kinds = (field.annotation, *get_args(field.annotation))
            parts = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]
            found += [missing for part in parts for missing in undescribed(part, f"{path}{key}.")]
            if not parts and field.description is None:
                found.append(f"{path}{key}")
        return found

    assert undescribed(task_class(task).config) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"depth": 1, "widht": 3}, r"^widht: there is no such option\. Did you mean width\?$"),
        ({"depth": 1, "width": 0}, r"^width: expected greater than 0 \(got 0\)$"),
        ({}, r"^depth: is missing\.$"),
        (
            {"depth": "deep", "width": -1},
            r"^width: .* \(got -1\)\ndepth: expected a valid integer.*'deep'\)$",
        ),
    ],
)
def test_a_mistake_is_told_by_key_value_and_what_was_expected(keys: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        configured(Wide, **keys)


def test_an_error_names_the_key_that_it_belongs_to_once() -> None:
    with pytest.raises(SettingsError, match=r"^model: width=3$"), errors_at("model"):
        raise ValueError("width=3")
    with pytest.raises(SettingsError, match=r"^model\.norm: no$"), errors_at("model"):
        raise SettingsError("model.norm: no")


def test_a_lack_of_memory_names_the_key_and_another_error_stays() -> None:
    for size in (1 << 50, 1 << 62):
        with pytest.raises(SettingsError, match=r"^model: it is too large for"), errors_at("model"):
            torch.empty(size)
    with pytest.raises(RuntimeError, match="size"), errors_at("model"):
        torch.empty(2) + torch.empty(3)


def test_arguments_are_known_ours_or_of_the_wrong_kind() -> None:
    def detector(
        backbone: object,
        score: float = 0.5,
        topk: int = 9,
        image_mean: object = None,
        head: object = None,
    ) -> None:
        """Has an argument of every kind."""

    def check(**options: object) -> None:
        check_arguments(options, detector, "Detector", own={"backbone": "arch"})

    check(score=0.1, topk=3, image_mean=(1.0, 2, 3), head=detector)
    for options, expected in (
        ({"scores": 1}, "Detector has no option 'scores'. Did you mean score?"),
        ({"backbone": 1}, "polynl sets backbone of Detector itself; use arch instead"),
        ({"score": "high"}, "score of Detector: expected a number, got 'high'"),
        ({"topk": -1}, "topk of Detector: expected a whole number above 0, got -1"),
        ({"topk": 1.5}, "topk of Detector: expected a whole number above 0, got 1.5"),
        ({"image_mean": [1, 2]}, "image_mean of Detector: expected three numbers, got [1, 2]"),
        ({"head": 3}, "head of Detector: expected a module, got 3"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
            check(**options)  # type: ignore[arg-type]
