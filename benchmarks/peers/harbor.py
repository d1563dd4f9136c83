"""Harbor: python harbor.py TASKS ATIF TERMINAL_BENCH SCRATCH. Its models, linter, ATIF and mapper."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from harbor.lint.models import DEFAULT_RULES
from harbor.lint.task import lint_task
from harbor.mappers.terminal_bench import TerminalBenchMapper
from harbor.models.task.task import Task
from harbor.models.trajectories import Trajectory

tasks, atif, bench, scratch = map(Path, sys.argv[1:])
loaded = [Task(folder) for folder in sorted(tasks.iterdir())]
findings = [
    str(finding)
    for folder in sorted(tasks.iterdir())
    for finding in lint_task(folder, selected_rules=DEFAULT_RULES)
]
steps = [len(Trajectory.model_validate_json(line).steps) for line in atif.read_text().splitlines()]
mapped = TerminalBenchMapper().map(bench, scratch)
print(
    json.dumps(
        {
            "version": version("harbor"),
            "tasks": len(loaded),
            "findings": findings,
            "instructions": {task.paths.task_dir.name: task.instruction for task in loaded},
            "trajectories": steps,
            "mapped": [Task(folder).paths.task_dir.name for folder in mapped.mapped],
            "unmapped": [str(failure) for failure in mapped.failed],
        }
    )
)
