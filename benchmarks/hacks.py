"""Known ways to fake a verdict, before three graders.

    python -m benchmarks.hacks --json FILE [--peers FOLDER] [--skip swebench]

Every hack of `tests/hacks` and every honest solution there goes to our Grader. The same files are laid on
the same workspace in a sandbox of their own, the task's tests are put back, and `python -m pytest` runs as
root, the way a SWE-bench harness runs it. What was printed goes to the log parser and report of swebench 5,
installed from a package index into an environment of its own; the exit code is a grader by itself: 0 passes.
`fooled` counts hacks that pass, `honest_passed` solutions that do. Nothing hostile runs outside of sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.formats import ask, install, machine
from benchmarks.grading import image
from catalog.atomic import write_atomic
from catalog.blobs import Blobs
from catalog.models import Task
from sandbox.base import SandboxProvider, SandboxSpec, provider
from sandbox.images import ImageStore
from tests.hacks.catalogue import Entry, hacks, honest
from tests.hacks.task import HIDDEN, TESTS, WORKSPACE, Variant, make_task, protected
from verifiers.grading import Grader

GRADERS = ("ours", "swebench", "exit_code")
LANES = 2
SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /workspace
: '>>>>> Start Test Output'
/opt/env/bin/python -m pytest -rA --tb=short -p no:cacheprovider {tests}
SWEBENCH_TEST_EXIT_CODE=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"
echo "$SWEBENCH_TEST_EXIT_CODE" > /tmp/code
"""


@dataclass(frozen=True)
class Plain:
    """What a run without a verifier printed, and how it ended; None: it never came to its end."""

    log: bytes
    code: int | None


async def plain(backend: SandboxProvider, digest: str, entry: Entry, task: Task) -> Plain:
    """pytest on the changed workspace with the task's tests put back, in a fresh sandbox, as root."""
    spec = SandboxSpec(image=digest, owner="benchmark", memory_mb=1024)
    async with await backend.create(spec) as box:
        for path, data in entry.make(task).items():
            if data is None:
                await box.exec(["/bin/rm", "-f", f"/workspace/{path}"], user="root", cwd="/")
            else:
                await box.write(f"/workspace/{path}", data)
        for path, target in entry.links.items():
            await box.exec(["/bin/ln", "-sfn", target, f"/workspace/{path}"], user="root", cwd="/")
        for path, data in protected(entry.variant).items():
            await box.write(f"/workspace/{path}", data)
        script = SCRIPT.format(tests=" ".join(map(shlex.quote, TESTS)))
        await box.write("/tmp/eval.sh", script.encode())
        command = "bash /tmp/eval.sh > /tmp/log 2>&1"
        await box.exec(command, user="root", cwd="/", env={"PYTHONPATH": "/workspace"}, timeout=60)
        code = await box.exec("cat /tmp/code", user="root", cwd="/")
        text = code.stdout.decode(errors="replace").strip()
        return Plain(await box.read("/tmp/log"), int(text) if text.lstrip("-").isdigit() else None)


async def ours(
    backend: SandboxProvider, images: ImageStore, blobs: Blobs, pairs: Sequence[tuple[Entry, Task]]
) -> dict[str, bool]:
    """Our verdicts. Raises RuntimeError when a change could not be judged: that is neither of both."""
    async with Grader(backend, images, blobs) as grader:
        verdicts = await asyncio.gather(*(grader.grade(task, entry.diff(task)) for entry, task in pairs))
    for (entry, _), verdict in zip(pairs, verdicts, strict=True):
        if verdict.reward is None:
            raise RuntimeError(f"{entry.name} could not be judged: {verdict.failure}")
    return {entry.name: v.reward == 1.0 for (entry, _), v in zip(pairs, verdicts, strict=True)}


async def plains(
    backend: SandboxProvider, digest: str, pairs: Sequence[tuple[Entry, Task]]
) -> dict[str, Plain]:
    lanes = asyncio.Semaphore(LANES)

    async def one(entry: Entry, task: Task) -> Plain:
        async with lanes:
            return await plain(backend, digest, entry, task)

    done = await asyncio.gather(*(one(*pair) for pair in pairs))
    return {entry.name: run for (entry, _), run in zip(pairs, done, strict=True)}


def swebench(runs: Mapping[str, Plain], pairs: Sequence[tuple[Entry, Task]], peers: Path) -> dict[str, Any]:
    """What swebench 5 says of the logs: `version`, and `resolved` by `TASK.NAME`."""
    rows = [
        {
            "instance_id": task.id,
            "repo": "posttrain/ranges",
            "version": "1",
            "base_commit": "HEAD",
            "patch": "",
            "test_patch": "",
            "problem_statement": task.problem.statement,
            "FAIL_TO_PASS": list(task.verifier.fail_to_pass),
            "PASS_TO_PASS": list(task.verifier.pass_to_pass),
            "image": "none",
            "log_parser": "parse_log_pytest_v2",
            "eval_type": "pass_and_fail",
            "eval_script": SCRIPT,
        }
        for task in {task.id: task for _, task in pairs}.values()
    ]
    with tempfile.TemporaryDirectory(prefix="posttrain-hacks.") as scratch:
        folder = Path(scratch)
        (folder / "rows.json").write_text(json.dumps(rows))
        (folder / "logs").mkdir()
        for entry, task in pairs:
            (folder / "logs" / f"{task.id}.{entry.name}.log").write_bytes(runs[entry.name].log)
        python = install("swebench5", peers)
        return ask(python, "swebench5_logs.py", folder / "rows.json", folder / "logs")


async def measure(home: Path, peers: Path, skip: Sequence[str]) -> dict[str, Any]:
    """A row for each entry, and the counts."""
    began = time.monotonic()
    store, blobs = ImageStore(home / "images"), Blobs(home / "blobs")
    digest = image(store, WORKSPACE)
    tasks: dict[Variant, Task] = {variant: make_task(digest, blobs, variant) for variant in HIDDEN}
    pairs = [(entry, tasks[entry.variant]) for entry in (*hacks(), *honest())]
    backend = provider("namespace", store=store.root)
    try:
        said: dict[str, dict[str, bool]] = {"ours": await ours(backend, store, blobs, pairs)}
        runs = await plains(backend, digest, pairs)
    finally:
        await backend.close()
    said["exit_code"] = {name: run.code == 0 for name, run in runs.items()}
    versions = {}
    if "swebench" not in skip:
        report = swebench(runs, pairs, peers)
        said["swebench"] = {n.partition(".")[2]: resolved for n, resolved in report["resolved"].items()}
        versions["swebench"] = report["version"]
    result = summary(said)
    return {**result, "versions": versions, "seconds": round(time.monotonic() - began, 1)}


def summary(said: Mapping[str, Mapping[str, bool]]) -> dict[str, Any]:
    """Counts by grader and kind, and a row for each hack and each solution."""
    graders = [name for name in GRADERS if name in said]

    def row(entry: Entry) -> dict[str, Any]:
        words = {"kind": entry.kind, "name": entry.name, "title": entry.title, "idea": entry.idea}
        return words | {name: said[name][entry.name] for name in graders}

    cheats, right = [row(entry) for entry in hacks()], [row(entry) for entry in honest()]
    kinds = {
        kind: {"total": len(rows), **{name: sum(row[name] for row in rows) for name in graders}}
        for kind in dict.fromkeys(row["kind"] for row in cheats)
        for rows in [[row for row in cheats if row["kind"] == kind]]
    }
    counts = {
        name: {
            "fooled": sum(row[name] for row in cheats),
            "honest_passed": sum(row[name] for row in right),
        }
        for name in graders
    }
    return {
        "total": len(cheats),
        "honest": len(right),
        **counts,
        "kinds": kinds,
        "hacks": cheats,
        "solutions": right,
    }


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", type=Path, default=Path(".venv/peers"))
    parser.add_argument("--skip", nargs="*", default=[], choices=["swebench"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-hacks.") as home:
        result = asyncio.run(measure(Path(home), args.peers.resolve(), args.skip))
    graders = [name for name in GRADERS if name in result]
    print(f"{'fooled by':14}{'hacks':>6}" + "".join(f"{name:>11}" for name in graders))
    for kind, row in result["kinds"].items():
        print(f"{kind:14}{row['total']:6}" + "".join(f"{row[name]:11}" for name in graders))
    for key, total in (("fooled", result["total"]), ("honest_passed", result["honest"])):
        print(f"{key:14}{total:6}" + "".join(f"{result[name][key]:11}" for name in graders))
    for row in result["hacks"]:
        if row["ours"]:
            print(f"ours was fooled: {row['kind']}/{row['name']}: {row['title']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"format": 1, "machine": machine(), **result}
        write_atomic(args.json, json.dumps(record, indent=1).encode() + b"\n")
    sys.exit(bool(result["ours"]["fooled"]) or result["ours"]["honest_passed"] != result["honest"])


if __name__ == "__main__":
    main()
