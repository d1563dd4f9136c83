"""swebench 5: python swebench5.py REPOSITORY ROWS LOGS. Its checker, its loaders, its reports on our logs."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from swebench.harness.grading import get_eval_report
from swebench.harness.utils import load_swebench_dataset, make_test_spec
from swebench.task.checks import check_task_repo
from swebench.task.repo import select_tasks

repository, rows, logs = sys.argv[1:]
tasks = {task["instance_id"]: task for task in select_tasks(repository)}
same = all(tasks[row["instance_id"]]["patch"] == row["patch"] for row in load_swebench_dataset(rows))
resolved, statuses = {}, {}
for log in sorted(Path(logs).glob("*.log")):
    id, _, variant = log.stem.rpartition(".")
    prediction = {"instance_id": id, "model_name_or_path": variant, "model_patch": "x"}
    report = get_eval_report(make_test_spec(tasks[id]), prediction, str(log), include_tests_status=True)[id]
    resolved[log.stem] = report["resolved"]
    statuses[log.stem] = report["tests_status"]
print(
    json.dumps(
        {
            "version": version("swebench"),
            "problems": [str(problem) for problem in check_task_repo(repository)],
            "tasks": len(tasks),
            "rows_agree": same,
            "resolved": resolved,
            "reports": statuses,
        }
    )
)
