"""How fast sandboxes are that already exist in some form: a warm pool, forks, keys, attached clients.

    python -m benchmarks.sandbox_reuse [--samples 50] [--json FILE]

Beside them `cold_ms`, a creation with its first command as in `benchmarks.sandbox`, and `exec_ms`, one more
command: read the others against these. `keyed_ms` waits until its result is on the disk; `recalled_ms` is the
same key again. `fork_ms` is a snapshot of 1 MiB of changes and one sandbox of it. Left out: other backends
than `namespace`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.sandbox import summary
from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider
from sandbox.pool import WarmPool


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--samples", type=int, default=50)
    return parser.parse_args()


async def measure(samples: int) -> dict[str, dict[str, float]]:
    names = ("cold_ms", "warm_ms", "exec_ms", "keyed_ms", "recalled_ms", "attach_ms", "fork_ms")
    found: dict[str, list[float]] = {name: [] for name in names}

    @asynccontextmanager
    async def timed(name: str) -> AsyncGenerator[None]:
        started = time.perf_counter()
        yield
        found[name].append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as folder:
        async with NamespaceProvider(Path(folder)) as provider, NamespaceProvider(Path(folder)) as other:
            spec = SandboxSpec(image=provider.images.host_base())
            other.capabilities()
            async with WarmPool(provider) as pool:
                for number in range(samples):
                    await one(provider, other, pool, spec, number, timed)
    return {name: summary(values) for name, values in found.items()}


async def one(
    provider: NamespaceProvider,
    other: NamespaceProvider,
    pool: WarmPool,
    spec: SandboxSpec,
    number: int,
    timed: Any,
) -> None:
    """One sample of each."""
    async with timed("cold_ms"):
        box = await provider.create(spec)
        await box.exec(["/bin/echo", "hello"])
    await pool.keep(spec, 1)
    async with timed("warm_ms"):
        warm = await pool.create(spec)
        await warm.exec(["/bin/echo", "hello"])
    await pool.keep(spec, 0)
    await warm.close()
    async with timed("exec_ms"):
        await box.exec(["/bin/true"])
    for name in ("keyed_ms", "recalled_ms"):
        async with timed(name):
            await box.exec(["/bin/true"], key=str(number))
    async with timed("attach_ms"):
        guest = await other.attach(box.id)
        await guest.exec(["/bin/true"])
    await guest.close()
    await box.write("changes", os.urandom(1 << 20))
    async with timed("fork_ms"):
        (child,) = await box.fork(1)
    await child.close()
    await box.close()


def main() -> None:
    options = parse()
    found = asyncio.run(measure(options.samples))
    for name, values in found.items():
        print(f"{name:12}", "  ".join(f"{key} {value:8.2f}" for key, value in values.items()))
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps({**found, "load": load, "cores": os.cpu_count()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
