"""How fast sandboxes start and answer, and how many live at once.

    python -m benchmarks.sandbox [--json FILE] [--samples 100] [--alive 300]

Measured with all limits on and no warm pool: create to first output, the round trip of one more command, and
a number of idle sandboxes alive together (their memory from MemAvailable, their round trip while all live).
`subprocess` is the machine's own price of a process at the same time: read the others against it, and
against the load average. Left out: peers, other backends and duty mixes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider


def summary(seconds: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    ordered = sorted(seconds)
    pick = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3  # noqa: E731
    return {
        "min": round(ordered[0] * 1e3, 2),
        "p50": round(statistics.median(ordered) * 1e3, 2),
        "p95": round(pick(0.95), 2),
        "p99": round(pick(0.99), 2),
    }


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


def available_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1])
    raise AssertionError("no MemAvailable in /proc/meminfo")


async def speed(provider: NamespaceProvider, image: str, samples: int) -> dict[str, dict[str, float]]:
    first: list[float] = []
    again: list[float] = []
    close: list[float] = []
    plain: list[float] = []
    for _ in range(samples):
        started = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        plain.append(time.perf_counter() - started)
        started = time.perf_counter()
        box = await provider.create(SandboxSpec(image=image))
        result = await box.exec(["/bin/echo", "hello"])
        first.append(time.perf_counter() - started)
        assert result.stdout == b"hello\n"
        for _ in range(5):
            again.append(await timed(lambda box=box: box.exec(["/bin/true"])))
        close.append(await timed(box.close))
    named = {"create_ms": first, "exec_ms": again, "close_ms": close, "subprocess_ms": plain}
    return {name: summary(values) for name, values in named.items()}


async def density(provider: NamespaceProvider, image: str, alive: int) -> dict[str, Any]:
    before = available_kib()
    started = time.perf_counter()
    spec = SandboxSpec(image=image, memory_mb=64, pids=32, disk_mb=16)
    boxes = [await provider.create(spec) for _ in range(alive)]
    created = time.perf_counter() - started
    mib_each = (before - available_kib()) / alive / 1024
    trips = [await timed(lambda box=box: box.exec(["/bin/true"])) for box in boxes]
    started = time.perf_counter()
    results = await asyncio.gather(*(box.exec(["/bin/echo", box.id]) for box in boxes))
    together = time.perf_counter() - started
    assert [result.stdout.decode().strip() for result in results] == [box.id for box in boxes]
    started = time.perf_counter()
    await asyncio.gather(*(box.close() for box in boxes))
    return {
        "alive": alive,
        "create_per_s": round(alive / created, 1),
        "mib_each": round(mib_each, 2),
        "exec_ms": summary(trips),
        "all_at_once_s": round(together, 2),
        "close_all_s": round(time.perf_counter() - started, 2),
    }


async def measure(samples: int, alive: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with NamespaceProvider(Path(folder)) as provider:
            image = provider.images.host_base()
            capabilities = provider.capabilities()
            await speed(provider, image, 5)
            found: dict[str, Any] = await speed(provider, image, samples)
            found["density"] = await density(provider, image, alive)
            found["unenforced"] = list(capabilities.unenforced)
    found["load"] = os.getloadavg()[0]
    found["cores"] = os.cpu_count()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--alive", type=int, default=300)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = options.alive * 8 + 512  # a socket each, pipes and sockets of commands under way
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    found = asyncio.run(measure(options.samples, options.alive))
    for name in ("create_ms", "exec_ms", "close_ms", "subprocess_ms"):
        print(f"{name:14}", "  ".join(f"{key} {value:8.2f}" for key, value in found[name].items()))
    for name, value in found["density"].items():
        print(f"{name:14} {value}")
    print(f"load average {found['load']:.1f} on {found['cores']} cores")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
