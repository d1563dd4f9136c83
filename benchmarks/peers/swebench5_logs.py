"""swebench 5: python swebench5_logs.py ROWS LOGS. Its report on each `ID.VARIANT.log`, given rows as JSON."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from swebench.harness.grading import get_eval_report
from swebench.harness.utils import make_test_spec

rows, logs = sys.argv[1:]
specs = {row["instance_id"]: make_test_spec(row) for row in json.loads(Path(rows).read_text())}
resolved = {}
for log in sorted(Path(logs).glob("*.log")):
    id, _, variant = log.stem.partition(".")
    prediction = {"instance_id": id, "model_name_or_path": variant, "model_patch": "x"}
    report = get_eval_report(specs[id], prediction, str(log), include_tests_status=True)[id]
    resolved[log.stem] = report["resolved"]
print(json.dumps({"version": version("swebench"), "resolved": resolved}))
