"""The tasks by name; a task is imported when a recipe asks for it."""

from __future__ import annotations

import importlib

from polynl.errors import SettingsError, near_matches
from polynl.extras import check_extra
from polynl.tasks.base import Task

# The module and the class; the order is that of reports.
TASKS: dict[str, str] = {
    "classification": "polynl.tasks.classification.task:Classification",
    "instance_segmentation": "polynl.tasks.instance_segmentation.task:InstanceSegmentation",
    "object_detection": "polynl.tasks.object_detection.task:ObjectDetection",
    "face_detection": "polynl.tasks.face_detection.task:FaceDetection",
}


def task_class(name: object) -> type[Task]:
    """The class of the task called `name`, or a SettingsError that lists the tasks."""
    if not isinstance(name, str) or name not in TASKS:
        hint = near_matches(str(name), TASKS)
        raise SettingsError(f"task must be one of {', '.join(TASKS)}; got {name!r}.{hint}")
    module, _, attribute = TASKS[name].partition(":")
    found: type[Task] = getattr(importlib.import_module(module), attribute)
    check_extra(found.extra)
    return found
