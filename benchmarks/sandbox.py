"""How fast sandboxes start and answer, and how many live at once.

    python -m benchmarks.sandbox [--json FILE] [--samples 100] [--alive 300] [--docker FOLDER] [--sweep]

Measured with all limits on and no warm pool: create to first output, the round trip of one more command, and
a number of idle sandboxes alive together (their memory from MemAvailable, their round trip while all live).
`subprocess` is the machine's own price of a process at the same time: read the others against it, and
against the load average.

With --docker, in turns with the namespace backend on the same machine: our docker backend, plain `docker run`
with `docker exec`, and SWE-ReX's docker deployment, on one private engine and one image (FOLDER keeps what
they need between runs; needs root, docker.io, mmdebstrap and registries). Namespaces share the host's files
and have no engine: another level of isolation, not a better docker.

With --sweep, sandboxes that work now and then, up to 10,000 of them (`benchmarks.sandbox_sweep`): half an
hour and more. `knee` is null without; `idle_max` is the largest number that lived together, `mib_each` their
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandbox.base import AdmissionRefused, Sandbox, SandboxProvider, SandboxSpec
from sandbox.namespace import NamespaceProvider

Times = dict[str, list[float]]
REPEATS = 5
TURNS = 5


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


async def speed(provider: SandboxProvider, image: str, samples: int) -> Times:
    """Creation up to the first command's output, one more command, closing; all in seconds."""
    times: Times = {"create": [], "exec": [], "close": []}
    for _ in range(samples):
        started = time.perf_counter()
        box = await provider.create(SandboxSpec(image=image))
        result = await box.exec(["/bin/echo", "hello"])
        times["create"].append(time.perf_counter() - started)
        assert result.stdout == b"hello\n"
        for _ in range(REPEATS):
            times["exec"].append(await timed(lambda box=box: box.exec(["/bin/true"])))
        times["close"].append(await timed(box.close))
    return times


def plain(samples: int) -> Times:
    """What the machine asks for a process."""
    times: Times = {"exec": []}
    for _ in range(samples):
        started = time.perf_counter()
        subprocess.run(["/bin/true"], check=True)
        times["exec"].append(time.perf_counter() - started)
    return times


def add(total: dict[str, Times], backend: str, times: Times) -> None:
    for name, values in times.items():
        total.setdefault(backend, {}).setdefault(name, []).extend(values)


async def density(provider: SandboxProvider, image: str, alive: int) -> dict[str, Any]:
    before = available_kib()
    started = time.perf_counter()
    spec = SandboxSpec(image=image, memory_mb=64, pids=32, disk_mb=16)
    boxes: list[Sandbox] = []
    with contextlib.suppress(AdmissionRefused):  # then the node is full, and that is the figure
        while len(boxes) < alive:
            boxes.append(await provider.create(spec))
    created = time.perf_counter() - started
    alive = len(boxes)
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


async def beside_docker(
    total: dict[str, Times], provider: NamespaceProvider, samples: int, folder: Path
) -> None:
    """Turns of all backends, so that whatever else this machine does meets them alike."""
    from benchmarks import _peers
    from sandbox.docker import DockerProvider
    from sandbox.docker.private import PrivateEngine

    peers = _peers.Peers(folder)
    peers.prepare()
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as place,
        PrivateEngine(Path(place), bridge=True, remap=False) as engine,
    ):
        peers.load(engine)
        async with DockerProvider(provider.images, url=engine.url) as ours:
            with peers.tar.open("rb") as tar:
                image = provider.images.stack(None, provider.images.import_layer(tar))
            await speed(ours, image, 1)
            for turn in range(TURNS):
                part = samples // TURNS + (turn < samples % TURNS)
                add(total, "namespace", await speed(provider, provider.images.host_base(), part))
                add(total, "docker", await speed(ours, image, part))
                add(total, "docker_run", _peers.docker_run(engine, part, REPEATS))
                add(total, "swerex_docker", peers.swerex(engine, part, REPEATS))
                add(total, "subprocess", plain(part))


async def measure(
    samples: int, alive: int, docker: Path | None, counts: tuple[int, ...], minutes: float
) -> dict[str, Any]:
    from benchmarks import sandbox_sweep

    total: dict[str, Times] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with NamespaceProvider(Path(folder)) as provider:
            image = provider.images.host_base()
            await speed(provider, image, 5)
            if docker is None:
                add(total, "namespace", await speed(provider, image, samples))
                add(total, "subprocess", plain(samples))
            else:
                await beside_docker(total, provider, samples, docker)
            found: dict[str, Any] = {
                f"{name}_ms": {
                    backend: summary(times[name]) for backend, times in total.items() if name in times
                }
                for name in ("create", "exec", "close")
            }
            idle = await density(provider, image, alive) if alive else None
            sweep = await sandbox_sweep.sweep(provider, image, counts, minutes) if counts else None
            reached = [idle] if idle else []
            reached += sweep["points"] if sweep else []
            most = max(reached, key=lambda each: each["alive"], default={})
            found |= {
                "knee": sweep["knee"] if sweep else None,
                "idle_max": most.get("alive"),
                "mib_each": most.get("mib_each"),
                "density": idle,
                "sweep": sweep,
            }
            found["unenforced"] = list(provider.capabilities().unenforced)
    found["samples"] = samples
    found["load"] = os.getloadavg()[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    found["cores"] = os.cpu_count()
    found["machine"] = f"{os.cpu_count()} cores, {memory:.0f} GiB, kernel {os.uname().release.split('-')[0]}"
    return found


def main() -> None:
    from benchmarks import sandbox_sweep

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--alive", type=int, default=300)
    parser.add_argument("--docker", type=Path, metavar="FOLDER", help="measure docker and its peers too")
    parser.add_argument(
        "--sweep", nargs="?", const=",".join(map(str, sandbox_sweep.COUNTS)), metavar="COUNTS",
        help="counts of living sandboxes to sweep over (%(const)s)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5, help="of the sweep, at each count")
    options = parser.parse_args()
    counts = tuple(int(count) for count in options.sweep.split(",")) if options.sweep else ()
    sandbox_sweep.open_files(max(options.alive, *counts))
    found = asyncio.run(measure(options.samples, options.alive, options.docker, counts, options.minutes))
    for name in ("create_ms", "exec_ms", "close_ms"):
        for backend, values in found[name].items():
            print(
                f"{name:10} {backend:14}", "  ".join(f"{key} {value:8.2f}" for key, value in values.items())
            )
    for name, value in (found["density"] or {}).items():
        print(f"{name:14} {value}")
    print(f"knee {found['knee']}, idle_max {found['idle_max']}, mib_each {found['mib_each']}")
    print(f"load average {found['load']:.1f} on {found['cores']} cores")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
