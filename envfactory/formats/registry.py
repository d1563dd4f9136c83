"""The formats by name."""

from __future__ import annotations

from typing import cast

from catalog.errors import did_you_mean
from envfactory.formats import harbor, swebench, swebench_v5
from envfactory.formats.base import TaskFormat
from envfactory.formats.fields import FormatError

TASKS: dict[str, TaskFormat] = {
    module.name: cast(TaskFormat, module) for module in (swebench, swebench_v5, harbor)
}


def task_format(name: str) -> TaskFormat:
    """The format of tasks with that name. Raises FormatError."""
    if name not in TASKS:
        known = ", ".join(TASKS)
        raise FormatError(f"no format is called {name}: there are {known}.{did_you_mean(name, TASKS)}")
    return TASKS[name]
