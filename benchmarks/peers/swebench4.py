"""swebench 4.1 and swesmith: python swebench4.py ROWS SMITH LOGS. Their reports on our logs.

4.1 knows repositories by a table in its code, and swesmith by registered profiles: both are given ours.
"""

import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from swebench.harness import constants, grading
from swebench.harness.log_parsers.python import parse_log_pytest_v2
from swebench.harness.test_spec.test_spec import make_test_spec
from swebench.harness.utils import load_swebench_dataset
from swesmith.harness import grading as smith
from swesmith.profiles import registry
from swesmith.profiles.python import PythonProfile

rows_file, smith_file, logs = sys.argv[1:]
rows = {row["instance_id"]: row for row in load_swebench_dataset(rows_file)}
for row in rows.values():
    specs = {
        "python": "3.11",
        "packages": "",
        "install": "true",
        "test_cmd": "pytest -rA",
        "pip_packages": [],
    }
    constants.MAP_REPO_VERSION_TO_SPECS.setdefault(row["repo"], {})[row["version"]] = specs
    constants.MAP_REPO_TO_EXT[row["repo"]] = "py"
    grading.MAP_REPO_TO_PARSER[row["repo"]] = parse_log_pytest_v2
instances = {one["patch"]: one for one in json.loads(Path(smith_file).read_text())}


def profile(instance):
    mirror = instance["repo"].removeprefix("swesmith/")
    owner, _, rest = mirror.partition("__")
    name, _, commit = rest.rpartition(".")

    fields = {"owner": owner, "repo": name, "commit": commit}
    body = {**fields, "__annotations__": dict.fromkeys(fields, str)}
    body["log_parser"] = lambda self, log: parse_log_pytest_v2(log, None)
    made = dataclass(type(f"Profile{commit}", (PythonProfile,), body))
    registry.data[instance["repo"]] = made
    return made()


resolved, smith_resolved, wrong = {}, {}, []
for one in instances.values():
    made = profile(one)
    if made.repo_name != one["instance_id"].rsplit(".", 1)[0] or made.image_name != one["image_name"]:
        wrong.append(one["instance_id"])
    made.get_test_cmd(one)
for log in sorted(Path(logs).glob("*.log")):
    id, _, variant = log.stem.rpartition(".")
    prediction = {"instance_id": id, "model_name_or_path": variant, "model_patch": "x"}
    spec = make_test_spec(rows[id])
    resolved[log.stem] = grading.get_eval_report(spec, prediction, str(log), True)[id]["resolved"]
    instance = next(one for one in instances.values() if one["base_commit"] == rows[id]["base_commit"])
    # swesmith wants the marks as the shell traces them, which our logs have.
    smith_resolved[log.stem] = smith.get_eval_report(prediction, instance, str(log))["resolved"]
print(
    json.dumps(
        {
            "version": version("swebench"),
            "swesmith": version("swesmith"),
            "tasks": len(rows),
            "resolved": resolved,
            "smith_resolved": smith_resolved,
            "names_that_differ": wrong,
        }
    )
)
