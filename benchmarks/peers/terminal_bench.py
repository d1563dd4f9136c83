"""terminal-bench: python terminal_bench.py TASKS. Its models, and its parser on what our one test prints."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from terminal_bench.handlers.trial_handler import Task, TaskPaths
from terminal_bench.parsers.parser_factory import ParserFactory

names, files = [], []
for folder in sorted(Path(sys.argv[1]).iterdir()):
    paths = TaskPaths(folder)
    task = Task.from_yaml(paths.task_config_path)
    names.append([folder.name, str(task.difficulty.value), str(task.parser_name.value)])
    files.append(
        all(place.exists() for place in (paths.docker_compose_path, paths.run_tests_path, paths.test_dir))
    )
parser = ParserFactory.get_parser(task.parser_name)
line = "=== short test summary info ===\nPASSED test_outputs.py::test_task\n=== 1 passed in 0.1s ===\n"
print(
    json.dumps(
        {
            "version": version("terminal-bench"),
            "tasks": names,
            "files": files,
            "parsed": {name: str(status) for name, status in parser.parse(line).items()},
        }
    )
)
