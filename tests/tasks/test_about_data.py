"""What tasks say of their data and of their networks' names."""

from __future__ import annotations

from typing import get_args

import pytest

from polynl.models.resnet import archs
from polynl.results.study import network_name
from polynl.tasks.registry import TASKS, task_class


@pytest.mark.parametrize("name", TASKS)
def test_every_source_of_images_is_described(name: str) -> None:
    task = task_class(name)
    data = task.config.model_fields["data"].annotation
    for kind in get_args(data) or (data,):
        (source,) = get_args(kind.model_fields["source"].annotation)
        about = task.about_images(source)
        assert about.endswith("."), f"{kind.__name__} needs an `about`"
        assert about == kind.about
    assert task.about_images("of another version") == ""


def test_networks_have_the_names_of_their_papers() -> None:
    names = {arch: network_name(arch) for arch in archs()}
    assert not any("_" in name for name in names.values())
    assert len(set(names.values())) == len(names)
    assert names["resnet18"] == "ResNet-18"
