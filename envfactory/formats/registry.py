"""The formats by name."""

from __future__ import annotations

from typing import cast

from catalog.errors import did_you_mean
from envfactory.formats import (
    atif,
    harbor,
    huggingface,
    mini_swe_agent,
    openenv,
    swebench,
    swebench_v5,
    swerebench,
    swesmith,
    terminal_bench,
)
from envfactory.formats.base import TaskFormat
from envfactory.formats.fields import FormatError
from envfactory.formats.trajectories import TrajectoryFormat

_MODULES = (swebench, swebench_v5, swesmith, swerebench, harbor, terminal_bench, openenv, huggingface)
TASKS: dict[str, TaskFormat] = {module.name: cast(TaskFormat, module) for module in _MODULES}
TRAJECTORIES: dict[str, TrajectoryFormat] = {
    module.name: cast(TrajectoryFormat, module) for module in (atif, mini_swe_agent)
}


def task_format(name: str) -> TaskFormat:
    """The format of tasks with that name. Raises FormatError."""
    if name in TRAJECTORIES:
        raise FormatError(f"{name} holds trajectories: use `posttrain runs export` and `runs import`")
    if name not in TASKS:
        known = ", ".join(TASKS)
        raise FormatError(
            f"no format of tasks is called {name}: there are {known}.{did_you_mean(name, TASKS)}"
        )
    return TASKS[name]


def trajectory_format(name: str) -> TrajectoryFormat:
    """The format of trajectories with that name. Raises FormatError."""
    if name in TASKS:
        raise FormatError(f"{name} holds tasks: use `posttrain tasks export` and `tasks import`")
    if name not in TRAJECTORIES:
        known = ", ".join(TRAJECTORIES)
        hint = did_you_mean(name, TRAJECTORIES)
        raise FormatError(f"no format of trajectories is called {name}: there are {known}.{hint}")
    return TRAJECTORIES[name]
