"""How many edits each operator offers on a real package, and how many its own tests notice.

    python -m benchmarks.operators --home ~/.cache/posttrain --package boltons --kills 5

Prints one table and writes JSON. The package is fetched as a source distribution and only ever runs in
jails. A mutant is killed when a test that passes on the clean package does not, or the run does not finish.
Only functions that some test executes are mutated; `--kills 0` counts without running anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from catalog.models import TestStatus
from envfactory.bugs import coverage
from envfactory.build import Build, build
from envfactory.prune import test_path
from envfactory.sources import Limits, open_source
from sandbox.base import provider
from sandbox.images import ImageStore
from verifiers.operators import OPERATORS, Edit, edits, functions
from verifiers.runner import TestRunner

MAX_FILES = 6
"""Test files that one mutant is run on, those of the most specific tests first."""


async def measure(package: str, home: Path, kills: int, seed: int, jobs: int) -> dict[str, Any]:
    history = open_source(f"pypi:{package}", Limits(releases=1)).fetch(home, print)
    images, sandboxes = ImageStore(home / "images"), provider(store=home / "images")
    try:
        built = await build(history, home, sandboxes, images, progress=print)
        files = sources(built)
        began = time.perf_counter()
        offered = {path: edits(text) for path, text in files.items()}
        took = time.perf_counter() - began
        rows = {name: {"edits": 0, "run": 0, "killed": 0} for name in OPERATORS}
        for edit in (edit for many in offered.values() for edit in many):
            rows[edit.operator]["edits"] += 1
        ran = 0.0
        if kills:
            began = time.perf_counter()
            async with TestRunner(sandboxes, built.image, jobs=jobs) as runner:
                await run_mutants(runner, built, sample(offered, built, kills, seed), rows, jobs)
            ran = time.perf_counter() - began
    finally:
        await sandboxes.close()
    return {
        "format": 1,
        "package": built.name,
        "version": built.version,
        "files": len(files),
        "functions": sum(len(functions(text)) for text in files.values()),
        "edits": sum(row["edits"] for row in rows.values()),
        "edit_seconds": round(took, 2),
        "run_seconds": round(ran, 1),
        "seed": seed,
        "operators": {name: row | {"invertible": OPERATORS[name].invertible} for name, row in rows.items()},
    }


def sources(built: Build) -> dict[str, str]:
    """The package's own modules."""
    allowed = built.layout.allowed
    return {
        path: file.data.decode()
        for path, file in built.tree.items()
        if path.endswith(".py") and path.startswith(allowed)
    }


Sampled = tuple[str, Edit, tuple[str, ...]]
"""Path, edit, tests that execute the function."""


def sample(offered: dict[str, list[Edit]], built: Build, each: int, seed: int) -> list[Sampled]:
    """At most `each` edits of every operator in functions that tests execute."""
    tests_of = coverage(built.suite.functions)
    by_operator: dict[str, list[Sampled]] = {}
    for path, many in sorted(offered.items()):
        for edit in many:
            tests = tests_of.get(f"{path}::{edit.function.partition('.<locals>')[0]}")
            if tests:
                by_operator.setdefault(edit.operator, []).append((path, edit, tests))
    rng = random.Random(seed)
    return [one for many in by_operator.values() for one in rng.sample(many, min(each, len(many)))]


async def run_mutants(
    runner: TestRunner, built: Build, mutants: list[Sampled], rows: dict[str, dict[str, int]], jobs: int
) -> None:
    room = asyncio.Semaphore(jobs)

    async def one(path: str, edit: Edit, tests: tuple[str, ...]) -> None:
        async with room:
            chosen = list(dict.fromkeys(test_path(test) for test in tests))[:MAX_FILES]
            run = await runner.run({path: edit.source.encode()}, chosen, timeout=15)
        expected = built.suite.statuses
        worse = [
            test
            for test, status in expected.items()
            if test_path(test) in chosen and status is TestStatus.PASSED and run.tests.get(test) is not status
        ]
        rows[edit.operator]["run"] += 1
        rows[edit.operator]["killed"] += bool(worse) or run.outcome != "finished"

    await asyncio.gather(*(one(*mutant) for mutant in mutants))


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['package']} {result['version']}: {result['files']} files, {result['functions']} functions, "
        f"{result['edits']} edits in {result['edit_seconds']} s",
        f"{'operator':22}{'edits':>7}{'way back':>10}{'run':>6}{'killed':>8}",
    ]
    total: Counter[str] = Counter()
    for name, row in result["operators"].items():
        total.update({key: row[key] for key in ("edits", "run", "killed")})
        killed = f"{row['killed'] / row['run']:.0%}" if row["run"] else "-"
        back = "yes" if row["invertible"] else "no"
        lines.append(f"{name:22}{row['edits']:7}{back:>10}{row['run']:6}{killed:>8}")
    killed = f"{total['killed'] / total['run']:.0%}" if total["run"] else "-"
    lines.append(f"{'all':22}{total['edits']:7}{'':10}{total['run']:6}{killed:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "posttrain")
    parser.add_argument("--package", default="boltons")
    parser.add_argument("--kills", type=int, default=5, help="mutants to run of each operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/operators.json"))
    given = parser.parse_args()
    result = asyncio.run(measure(given.package, given.home, given.kills, given.seed, given.jobs))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
