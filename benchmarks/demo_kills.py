"""Does the demo survive kill -9? One run undisturbed, one killed at random moments; both must agree.

    python -m benchmarks.demo_kills --json docs/results/demo_kills.json [--config FILE.toml] [--kills 3]

Both run in deterministic mode in fresh folders. Compared: ids, status and gates of all tasks; the final
table; and that no task, trajectory or step is there twice or missing. A kill takes the process alone;
its sandboxes must die by themselves.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from catalog.jsonl import read_lines
from catalog.store import Catalog

SMALL = """
deterministic = true
[synth]
tasks = {train = 24, dev = 4, test = 24}
history = false
[sft]
steps = 20
batch_samples = 16
[slim]
policy = "flash-slim"
steps = 10
batch_samples = 16
[rl]
steps = 4
[rl.effort]
efforts = [25, 100]
[opd]
steps = 2
teachers = [{name = "rl", policy = "set by the demo"}]
[service]
in_flight = 32
batch_prompts = 4
samples = 4
efforts = [25, 100]
"""


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="settings of the demo; default: a small one")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="where both runs go; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-kills.") as scratch:
        root = args.folder or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        config = args.config or root / "config.toml"
        if args.config is None:
            config.write_text(SMALL, encoding="utf-8")
        seconds = undisturbed(root / "whole", config)
        moments = killed(root / "killed", config, seconds, args.kills, args.seed)
        result = compare(root / "whole", root / "killed") | {"seconds": seconds, "killed_at": moments}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1))
    sys.exit(0 if result["agree"] else 1)


def command(folder: Path, config: Path) -> list[str]:
    return [sys.executable, "-m", "console", "demo", "--folder", str(folder), "--config", str(config)]


def undisturbed(folder: Path, config: Path) -> float:
    """Run to the end; returns seconds."""
    began = time.monotonic()
    subprocess.run(command(folder, config), check=True)
    return round(time.monotonic() - began, 1)


def killed(folder: Path, config: Path, seconds: float, kills: int, seed: int) -> list[float]:
    """Run, killed at random moments of the run's own time, then to the end; returns the moments."""
    rng = random.Random(seed)
    moments = sorted(rng.uniform(0.03, 0.97) * seconds for _ in range(kills))
    spent = 0.0
    for moment in moments:
        process = subprocess.Popen(command(folder, config))
        try:
            process.wait(timeout=max(1.0, moment - spent))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        spent = moment
    subprocess.run(command(folder, config), check=True)
    return [round(moment, 1) for moment in moments]


def compare(whole: Path, other: Path) -> dict[str, Any]:
    """What agrees between the two folders."""
    first, second = judged(whole), judged(other)
    table = [summary(folder) for folder in (whole, other)]
    twice = {
        name: doubles(other, name)
        for name in ("rl", "opd", "evaluation/sft", "evaluation/rl", "evaluation/opd")
    }
    steps = {
        name: [line["step"] for line in read_lines(other / name / "metrics.jsonl")]
        for name in ("sft", "rl", "opd")
    }
    found = {
        "tasks": len(first),
        "same_tasks_and_gates": first == second,
        "same_table": table[0] == table[1],
        "trajectories_twice": twice,
        "steps_in_order": {name: found == list(range(1, len(found) + 1)) for name, found in steps.items()},
    }
    agree = found["same_tasks_and_gates"] and found["same_table"] and not any(twice.values())
    return found | {"agree": agree and all(found["steps_in_order"].values())}


def steps_of(run: Path) -> list[int]:
    """Steps in a run's metrics, in order."""
    return [line["step"] for line in read_lines(run / "metrics.jsonl")]


def judged(folder: Path) -> dict[str, Any]:
    """Task id -> status and gates."""
    with Catalog.open(folder / "home") as catalog:
        reports = {report.task_id: report for report in catalog.list_reports()}
        return {
            task.id: [task.status.value, [(gate.name, gate.passed) for gate in reports[task.id].gates]]
            for task in catalog.list_tasks()
        }


def summary(folder: Path) -> dict[str, Any]:
    """The final document without times."""
    value = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    value.pop("seconds")
    for name in ("utilisation", "utilisation_unpaused"):
        value["rl"].pop(name)
    return value


def doubles(folder: Path, name: str) -> list[str]:
    """Trajectory ids that occur twice in a stage's log."""
    counts = Counter(line["id"] for line in read_lines(folder / name / "rollout" / "trajectories.jsonl"))
    return sorted(id for id, count in counts.items() if count > 1)


if __name__ == "__main__":
    main()
