"""The verifier that travels in exported folders: stdlib and pytest only, copied as it is.

    python judge.py --config config.json --files files --workspace /workspace --out /logs/verifier

Puts the task's own test files back, runs them in a process of their own, compares the complete set of test
ids with what the gold run had, and writes `reward.json` and `ctrf.json`. Printed text and exit codes do not
count. Weaker than `verifiers.grading`: the tests run with the rights of this script, in one container.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PLUGIN = """
import atexit, json, os
import pytest
found, place = {}, os.environ.pop("JUDGE_REPORT")
def pytest_runtest_logreport(report):
    xfail = hasattr(report, "wasxfail")
    if report.when == "call":
        kind = {"passed": "xpassed" if xfail else "passed", "skipped": "xfailed" if xfail else "skipped"}
        found[report.nodeid] = kind.get(report.outcome, "failed")
    elif report.outcome == "failed":
        found[report.nodeid] = "error"
    elif report.outcome == "skipped":
        found[report.nodeid] = "xfailed" if xfail else "skipped"
def pytest_sessionfinish(session):
    with open(place, "w") as file:
        json.dump(found, file)
"""
SETTINGS = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "sitecustomize.py"}
GOOD = {"passed", "xpassed"}


def main() -> int:
    """Judge the workspace; 0 for reward 1, 1 for reward 0, 2 when it could not be judged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config: dict[str, Any] = json.loads(args.config.read_text(encoding="utf-8"))
    restore(args.files, args.workspace)
    began = time.time()
    statuses = run(config, args.workspace)
    wrong = differences(config, statuses)
    for line in wrong[:20]:
        print(line)
    print(f"{len(wrong)} of {len(config['expected'])} tests differ" if wrong else "all tests as expected")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report = ctrf(statuses, config, began)
        (args.out / "ctrf.json").write_text(json.dumps(report), encoding="utf-8")
        (args.out / "reward.json").write_text(json.dumps({"reward": 0 if wrong else 1}), encoding="utf-8")
    return 1 if wrong else 0


def restore(files: Path, workspace: Path) -> None:
    """Lay the task's own files over the workspace, and remove settings that it does not have."""
    own = {place.relative_to(files).as_posix() for place in files.rglob("*") if place.is_file()}
    for place in sorted(workspace.rglob("*")):
        path = place.relative_to(workspace).as_posix()
        if place.name in SETTINGS and path not in own and not path.startswith(".git/"):
            place.unlink()
    for path in sorted(own):
        target = workspace / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        shutil.copyfile(files / path, target)


def run(config: dict[str, Any], workspace: Path) -> dict[str, str]:
    """Status of every test that reported; empty when the run did not end by itself."""
    with tempfile.TemporaryDirectory() as folder:
        plugin, report = Path(folder, "judge_plugin.py"), Path(folder, "report.json")
        plugin.write_text(PLUGIN, encoding="utf-8")
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH"), str(workspace)])])
        command = [sys.executable, "-m", "pytest", "-p", "judge_plugin", "-p", "no:cacheprovider", "-q"]
        try:
            subprocess.run(
                [*command, "--", *config["arguments"]],
                cwd=workspace,
                env={**os.environ, "PYTHONPATH": path, "JUDGE_REPORT": str(report)},
                timeout=float(config.get("timeout_s", 60)) * 10,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {}
        return json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}


def differences(config: dict[str, Any], statuses: dict[str, str]) -> list[str]:
    """What keeps the reward from being 1, one line each."""
    listed = {*config["FAIL_TO_PASS"], *config["PASS_TO_PASS"]}
    wrong: list[str] = []
    for name, wanted in config["expected"].items():
        status = statuses.get(name, "absent")
        if name in listed:
            good = status in GOOD
        elif wanted in ("failed", "error"):
            good = status != "absent"
        else:
            good = status == wanted or status in GOOD
        if not good:
            wrong.append(f"{name}: {status}, expected {'passed' if name in listed else wanted}")
    return wrong


def ctrf(statuses: dict[str, str], config: dict[str, Any], began: float) -> dict[str, Any]:
    """A Common Test Report Format document."""
    names = {"xpassed": "passed", "xfailed": "skipped", "error": "failed"}
    tests = [
        {"name": name, "status": names.get(status, status), "duration": 0}
        for name, status in statuses.items()
    ]
    count = {s: sum(t["status"] == s for t in tests) for s in ("passed", "failed", "skipped")}
    absent = len(set(config["expected"]) - set(statuses))
    summary = {"tests": len(tests) + absent, **count, "pending": 0, "other": absent}
    summary |= {"start": int(began * 1000), "stop": int(time.time() * 1000)}
    return {"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": tests}}


if __name__ == "__main__":
    sys.exit(main())
