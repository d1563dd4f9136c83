"""How many sandboxes that work now and then live on one node before short commands become slow.

    python -m benchmarks.sandbox --sweep [COUNTS] --minutes 5 --json FILE

At each count of living sandboxes every one runs a short command each 30 s, and one in 20 a job like a small
test run (0.3 s of a processor, at SCHED_IDLE) each 5 minutes, each beginning at a moment of its own. The knee
is the largest count whose 99th percentile of short commands stays below three times that of the first count.
Counts grow without making sandboxes anew; a node that refuses one more ends the sweep. Run it alone on the
machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.sandbox import Times, available_kib, summary, timed
from sandbox.base import AdmissionRefused, Sandbox, SandboxProvider, SandboxSpec

COUNTS = (100, 500, 1000, 2500, 5000, 10000)
COMMAND_SECONDS = 30.0
JOB_SECONDS = 300.0
ONE_IN = 20
TOGETHER = 8
"""Sandboxes that are made at once."""
FACTOR = 3.0
JOB = """
import ast, inspect, os, time, unittest
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
try: open('/proc/self/autogroup', 'w').write('19')  # the policy alone does not reach beyond its session
except OSError: pass
text = inspect.getsource(unittest.case)
while time.process_time() < 0.3: compile(ast.parse(text), 'case', 'exec')
"""


async def sweep(
    provider: SandboxProvider, image: str, counts: tuple[int, ...], minutes: float, seed: int = 1
) -> dict[str, Any]:
    """The points that were reached, and the knee."""
    spec = SandboxSpec(image=image, memory_mb=64, pids=32, disk_mb=16)
    boxes: list[Sandbox] = []
    points: list[dict[str, Any]] = []
    refused = None
    before = available_kib()
    try:
        for count in counts:
            refused = await grow(provider, spec, boxes, count)
            mib_each = (before - available_kib()) / 1024 / max(1, len(boxes))
            if refused is not None:
                break
            points.append({"alive": count, "mib_each": round(mib_each, 2)})
            points[-1] |= await traffic(boxes, minutes * 60, random.Random(f"{seed} {count}"))
            print(points[-1], flush=True)
    finally:
        await asyncio.gather(*(box.close() for box in boxes))
    return {"points": points, "knee": knee(points), "refused": refused, "seed": seed, "minutes": minutes}


async def grow(provider: SandboxProvider, spec: SandboxSpec, boxes: list[Sandbox], count: int) -> str | None:
    """Make sandboxes until `count` live; why the node refused one, if it did."""
    while len(boxes) < count:
        wanted = min(TOGETHER, count - len(boxes))
        made = await asyncio.gather(*(provider.create(spec) for _ in range(wanted)), return_exceptions=True)
        boxes += [each for each in made if not isinstance(each, BaseException)]
        for each in made:
            if isinstance(each, AdmissionRefused):
                return str(each)
            if isinstance(each, BaseException):
                raise each
    return None


async def traffic(boxes: list[Sandbox], seconds: float, rng: random.Random) -> dict[str, Any]:
    """Everybody works for that long; times of both kinds of commands."""
    times: Times = {"short": [], "job": []}
    end = time.monotonic() + seconds
    loops: list[Awaitable[None]] = []
    for number, box in enumerate(boxes):
        run = lambda box=box: short(box)  # noqa: E731
        loops.append(repeat(run, times["short"], COMMAND_SECONDS, rng.random(), end))
        if number % ONE_IN == 0:
            run = lambda box=box: job(box)  # noqa: E731
            loops.append(repeat(run, times["job"], JOB_SECONDS, rng.random(), end))
    began = time.monotonic()
    await asyncio.gather(*loops)
    found: dict[str, Any] = {"commands": len(times["short"]), "jobs": len(times["job"])}
    for kind, values in times.items():
        if values:
            found[f"{kind}_ms"] = summary(values)
    return {**found, "seconds": round(time.monotonic() - began, 1), "load": round(os.getloadavg()[0], 2)}


async def repeat(
    run: Callable[[], Awaitable[None]], times: list[float], period: float, phase: float, end: float
) -> None:
    """Run at fixed times, as people do who do not know how long the last one took."""
    due = time.monotonic() + phase * period
    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        times.append(await timed(run))
        due += period


async def short(box: Sandbox) -> None:
    assert (await box.exec(["/bin/true"])).ok


async def job(box: Sandbox) -> None:
    result = await box.exec(["python3", "-S", "-c", JOB], timeout=600)
    assert result.ok, result.text


def knee(points: list[dict[str, Any]]) -> int | None:
    """The largest count that is not yet slow; None where nothing was measured."""
    measured = [point for point in points if "short_ms" in point]
    if not measured:
        return None
    most = FACTOR * measured[0]["short_ms"]["p99"]
    return max(point["alive"] for point in measured if point["short_ms"]["p99"] < most)


def open_files(sandboxes: int) -> None:
    """Allow a socket and a log for each, and pipes and sockets of commands under way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sandboxes * 8 + 512
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
