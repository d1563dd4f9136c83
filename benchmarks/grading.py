"""Jailed test runs per second, beside plain `python -m pytest` processes on the same files.

    python -m benchmarks.grading --json FILE

The package's newest source distribution comes from the package index that pip is set up for; its code runs in
sandboxes only. Both sides run in one sandbox with the same interpreter, packages and files; the plain side
has neither jail nor restored files nor a tamper-proof result. Rounds alternate, so that a busy machine slows
both alike; the ratio is the figure to look at. Plain runs may keep compiled files between runs, as they do in
practice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks._borrowed import make_environment
from envfactory.index import PackageIndex
from envfactory.sdist import unpack
from sandbox.base import Sandbox, SandboxProvider, SandboxSpec, provider
from sandbox.images import ImageStore
from verifiers.runner import TestRunner

FILES = (
    "tests/test_iterutils.py",
    "tests/test_strutils.py",
    "tests/test_dictutils.py",
    "tests/test_urlutils.py",
)
JOBS = 2


def workspace(package: str) -> dict[str, bytes]:
    """Files of the newest source distribution."""
    index = PackageIndex()
    newest = [file for file in index.files(package) if file.name.endswith(".tar.gz")][-1]
    tree, _ = unpack(newest.name, index.download(newest))
    print(f"{newest.name}: {len(tree)} files")
    return {path: file.data for path, file in tree.items() if not file.link}


def image(store: ImageStore, files: dict[str, bytes]) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        environment, tree = Path(scratch) / "environment", Path(scratch) / "tree"
        make_environment(environment)
        for path, data in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
        base = store.add_layer(store.host_base(), environment, at="/opt/env")
        return store.add_layer(base, tree, at="/workspace", env={"PYTHONPATH": "/workspace"})


async def plain(sandbox: Sandbox, argument: str) -> None:
    command = ["/opt/env/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", argument]
    done = await sandbox.exec(command, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    if not done.ok:
        raise SystemExit(f"{argument} fails without a jail: {done.text[-500:]}")


async def jailed(runner: TestRunner, argument: str) -> None:
    run = await runner.run({}, [argument])
    if run.outcome != "finished" or any(status != "passed" for status in run.tests.values()):
        raise SystemExit(f"{argument} fails in a jail: {run.outcome} {run.messages}")


async def rate(one: Callable[[], Awaitable[None]], n: int) -> float:
    """Runs per second with JOBS at a time."""
    started = time.perf_counter()

    async def lane(count: int) -> None:
        for _ in range(count):
            await one()

    await asyncio.gather(*(lane(n // JOBS) for _ in range(JOBS)))
    return n // JOBS * JOBS / (time.perf_counter() - started)


async def measure(backend: SandboxProvider, digest: str, rounds: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    started = time.perf_counter()
    spec = SandboxSpec(image=digest, memory_mb=2048)
    async with TestRunner(backend, digest, jobs=JOBS) as runner, await backend.create(spec) as sandbox:
        results["start"] = {"seconds": time.perf_counter() - started}
        first = await runner.run({}, [FILES[0]])
        for argument in (*FILES, next(iter(first.tests))):
            await jailed(runner, argument)
            await plain(sandbox, argument)
            pairs: list[tuple[float, float]] = []
            for _ in range(rounds):
                free = await rate(lambda name=argument: plain(sandbox, name), 4)
                pairs.append((free, await rate(lambda name=argument: jailed(runner, name), 12)))
            results[argument] = {
                "plain_per_s": statistics.median(free for free, _ in pairs),
                "jailed_per_s": statistics.median(walled for _, walled in pairs),
                "ratio": statistics.median(walled / free for free, walled in pairs),
            }
    return results


async def run(rounds: int) -> dict[str, dict[str, float]]:
    files = workspace("boltons")
    with tempfile.TemporaryDirectory() as home:
        backend = provider("namespace", store=Path(home) / "images")
        try:
            return await measure(backend, image(ImageStore(Path(home) / "images"), files), rounds)
        finally:
            await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = asyncio.run(run(options.rounds))
    start = results.pop("start")["seconds"]
    print(f"warm runner and sandbox: {start:.2f} s; {JOBS} at a time\n")
    print(f"{'':44}{'plain/s':>10}{'jailed/s':>10}{'ratio':>8}")
    for name, row in results.items():
        print(f"{name[:43]:44}{row['plain_per_s']:10.2f}{row['jailed_per_s']:10.2f}{row['ratio']:8.2f}")
    if options.json:
        summary = {"jobs": JOBS, "start_s": start, "files": results}
        options.json.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
