"""Sandboxes made and left behind by clients that are killed at any moment: does anything stay?

    python -m benchmarks.sandbox_soak [--sandboxes 400] [--seed 0] [--json FILE]

Clients make sandboxes, run commands, leave background processes, hold tags, keys and leases, fork, and close
some. Each is killed with -9 after a random time, and sometimes its nodelet with it. Afterwards, when leases
are over and the owner was reaped and the image store collected once, what is left on the host is counted:
processes, control groups, mounts, records, sockets, promises, temporary folders. Logs stay on purpose. Left
out: backends other than `namespace`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sandbox.namespace import NamespaceProvider
from sandbox.oci.collect import collect

OWNER = "soak"
LEASE_SECONDS = 2.0
SLEEP = 700_000
"""Seconds that left processes sleep: the number is how they are found."""
CLIENT = """
import asyncio, random, sys
from pathlib import Path
from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider
store, seed, sleep, lease = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
chance = random.Random(seed)
async def one(provider, image):
    spec = SandboxSpec(image=image, owner="soak", memory_mb=64, pids=32, disk_mb=16,
                       lease_s=lease if chance.random() < 0.2 else None)
    box = await provider.create(spec)
    print("made", flush=True)
    await box.exec(f"setsid sleep {sleep} >/dev/null 2>&1 & echo x > file")
    what = chance.randrange(6)
    if what == 0: await box.exec(f"echo x >> n; sleep {sleep}", key="k", timeout=chance.random())
    elif what == 1: await (await box.spawn(f"echo up; sleep {sleep}", tag="t")).readline()
    elif what == 2:
        for child in await box.fork(2):
            print("made", flush=True)
            await child.exec(f"sleep {sleep} >/dev/null 2>&1 & echo y")
    elif what == 3: await box.write("big", bytes(1 << 20))
    elif what == 4: await box.snapshot()
    if chance.random() < 0.5: await box.close()
async def main():
    provider = NamespaceProvider(store)
    image = provider.images.host_base()
    provider.capabilities()
    print("nodelet", provider._nodelet.pid, flush=True)
    while True:
        await asyncio.gather(*(one(provider, image) for _ in range(chance.randrange(1, 4))),
        return_exceptions=True)
asyncio.run(main())
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--sandboxes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def one_client(store: Path, number: int, chance: random.Random) -> tuple[int, bool]:
    """Run a client until it is killed: (sandboxes that it made, whether its nodelet was killed too)."""
    arguments = [str(store), str(number), str(SLEEP + os.getpid()), str(LEASE_SECONDS)]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *arguments, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert client.stdout is not None
    nodelet = int((await client.stdout.readline()).split()[1])
    made, with_nodelet = 0, chance.random() < 0.2
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(chance.uniform(0.05, 4.0)):
            while line := await client.stdout.readline():
                made += line == b"made\n"
    if with_nodelet:
        with contextlib.suppress(ProcessLookupError):
            os.kill(nodelet, signal.SIGKILL)
    client.kill()
    made += (await client.stdout.read()).count(b"made\n")
    await client.wait()
    return made, with_nodelet


def left(store: Path, groups: list[Path]) -> dict[str, int]:
    """What the host still has of the sandboxes in `store`."""
    word = f"sleep\0{SLEEP + os.getpid()}\0".encode()
    processes = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            processes += path.read_bytes() == word
    mounts = Path("/proc/self/mounts").read_text().count(str(store))
    return {
        "processes": processes,
        "groups": sum(1 for parent in groups for _ in parent.glob(f"{OWNER}-*")),
        "mounts": mounts,
        "records": len(list((store / "run").glob("*.json"))),
        "sockets": len(list((store / "run").glob("*.sock"))),
        "promises": len(list((store / "node").glob("*.load"))),
        "folders": len(list(store.glob("*/.new-*"))),
    }


async def soak(wanted: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    started = time.monotonic()
    made = clients = nodelets = 0
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        async with NamespaceProvider(store) as provider:
            provider.capabilities()
            groups = [Path(path) for path in (provider._groups["memory"], provider._groups["pids"]) if path]
            while made < wanted:
                count, killed = await one_client(store, seed + clients, chance)
                made, clients, nodelets = made + count, clients + 1, nodelets + killed
            await asyncio.sleep(LEASE_SECONDS + 3)
            reaped = await provider.reap(OWNER)
            assert await provider.list(OWNER) == []
            collect(provider.images, grace_s=0)
        found = left(store, groups)
    return {"sandboxes": made, "clients_killed": clients, "nodelets_killed": nodelets, "reaped": reaped,
            "left": found, "seconds": round(time.monotonic() - started, 1)}  # fmt: skip


def main() -> int:
    options = parse()
    found = asyncio.run(soak(options.sandboxes, options.seed))
    for name, value in found.items():
        print(f"{name:16} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(found["left"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
