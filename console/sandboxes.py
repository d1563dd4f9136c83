"""`posttrain sandbox`: whether this host can keep foreign code in."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cyclopts import App

from console.session import InSession, clean

if TYPE_CHECKING:
    from sandbox.base import Capabilities

app = App(name="sandbox", help="Whether this host can keep foreign code in.")

app.command("console.sandbox_run:run", name="run")

_NAMES = {
    "network_none": "no network",
    "memory_limit": "memory limit",
    "pids_limit": "process limit",
    "disk_limit": "disk limit",
    "user_namespace": "user namespace",
}


@app.command
def check(*, rounds: int = 10, session: InSession) -> None:
    """Make sandboxes on this host, and say what is enforced in them and how long they take.

    Parameters
    ----------
    rounds
        Sandboxes to make and time.
    """
    capabilities, timings = asyncio.run(_measure(session.store(), max(1, rounds)))

    def show() -> None:
        for name, label in _NAMES.items():
            print(f"{'✓' if getattr(capabilities, name) else '✗'} {label}")
        for reason in capabilities.unenforced:
            print(f"  not enforced: {clean(reason)}")
        create, run = timings["create_ms"], timings["exec_ms"]
        print(f"Median of {rounds}: {create} ms to make one and run a command, {run} ms for another command.")

    session.emit({**asdict(capabilities), **timings}, show)


async def _measure(store: Any, rounds: int) -> tuple[Capabilities, dict[str, float]]:
    from sandbox.base import SandboxSpec, SandboxUnavailable, provider
    from sandbox.images import ImageStore

    sandboxes = provider(store=store)
    creates: list[float] = []
    execs: list[float] = []
    try:
        capabilities = sandboxes.capabilities()
        image = ImageStore(store).host_base()
        for _ in range(rounds):
            started = time.perf_counter()
            async with await sandboxes.create(SandboxSpec(image=image, owner="check", workdir="/")) as box:
                first = await box.exec(["true"])
                creates.append(time.perf_counter() - started)
                started = time.perf_counter()
                second = await box.exec(["true"])
                execs.append(time.perf_counter() - started)
            for result in (first, second):
                if not result.ok:
                    raise SandboxUnavailable(
                        f"a sandbox was made but `true` ended as {result.outcome.value} in it: {result.text}"
                    )
    finally:
        await sandboxes.close()
    medians = {"create_ms": statistics.median(creates), "exec_ms": statistics.median(execs)}
    return capabilities, {name: round(seconds * 1000, 1) for name, seconds in medians.items()}
