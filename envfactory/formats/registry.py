"""The formats by name."""

from __future__ import annotations

from typing import cast

from catalog.errors import did_you_mean
from envfactory.formats import (
    harbor,
    huggingface,
    swebench,
    swebench_v5,
    swerebench,
    swesmith,
    terminal_bench,
)
from envfactory.formats.base import TaskFormat
from envfactory.formats.fields import FormatError

_MODULES = (swebench, swebench_v5, swesmith, swerebench, harbor, terminal_bench, huggingface)
TASKS: dict[str, TaskFormat] = {module.name: cast(TaskFormat, module) for module in _MODULES}


def task_format(name: str) -> TaskFormat:
    """The format of tasks with that name. Raises FormatError."""
    if name not in TASKS:
        known = ", ".join(TASKS)
        raise FormatError(
            f"no format of tasks is called {name}: there are {known}.{did_you_mean(name, TASKS)}"
        )
    return TASKS[name]
