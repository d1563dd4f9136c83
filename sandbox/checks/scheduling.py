"""The class `batch`: it waits for everybody else, and cannot leave."""

from __future__ import annotations

import asyncio
import time

from sandbox.base import PolicyUnsupported
from sandbox.check import Bench, Check

_POLICY = "import os; print(os.sched_getscheduler(0))"
_ABOVE = """
import os, subprocess, sys
def leave(what):
    try: what()
    except OSError: return
    print('left')
own = os.sched_param(0)
leave(lambda: os.sched_setscheduler(0, os.SCHED_OTHER, own))
leave(lambda: os.sched_setscheduler(0, os.SCHED_BATCH, own))
leave(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
leave(lambda: os.nice(-1))
os.setsid() if os.fork() == 0 else os._exit(os.wait()[1])
print(os.sched_getscheduler(0), flush=True)
"""
_SPIN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
begin, end = float(sys.argv[2]), float(sys.argv[3])
while time.time() < begin: time.sleep(0.01)
used = time.process_time()
while time.time() < end: pass
print(time.process_time() - used)
"""
_CORE = """
import ctypes
cookie = ctypes.c_ulong(0)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(62, 0, 0, 0, ctypes.byref(cookie)) == 0, ctypes.get_errno()
print(cookie.value)
"""
IDLE, OTHER = b"5\n", b"0\n"
LEAD_SECONDS, SPIN_SECONDS = 1.5, 1.5


async def batch_is_idle(bench: Bench) -> None:
    """Every command of a batch sandbox runs at SCHED_IDLE, and neither user can leave it."""
    async with bench.box(scheduling="batch") as box:
        for user in ("agent", "root"):
            seen = await box.exec(["python3", "-c", _POLICY], user=user)
            assert seen.stdout == IDLE, seen.text
            seen = await box.exec(["python3", "-c", _ABOVE], user=user)
            assert seen.stdout == IDLE, seen.text
        process = await box.spawn(["python3", "-c", _POLICY])
        assert await process.readline() == IDLE
        await process.wait()


async def latency_is_ordinary(bench: Bench) -> None:
    """Other sandboxes run as ordinary processes do."""
    async with bench.box() as box:
        assert (await box.exec(["python3", "-c", _POLICY])).stdout == OTHER


async def batch_waits_for_others(bench: Bench) -> None:
    """On one processor, a sandbox of the class latency gets nearly all of it, a batch one what is left."""
    async with bench.box() as quick, bench.box(scheduling="batch") as slow:
        cpu = (await quick.exec(["python3", "-c", "import os; print(min(os.sched_getaffinity(0)))"])).text
        begin = time.time() + LEAD_SECONDS
        spin = ["python3", "-c", _SPIN, cpu.strip(), str(begin), str(begin + SPIN_SECONDS)]
        results = await asyncio.gather(quick.exec(spin), slow.exec(spin, timeout=120))
        assert all(result.ok for result in results), [result.text for result in results]
        used = [float(result.stdout) for result in results]
        assert used[1] < used[0] / 3, f"latency had {used[0]:.2f} s of the processor, batch {used[1]:.2f}"


async def cores_are_not_shared(bench: Bench) -> None:
    """Two sandboxes never run on the threads of one core at once."""
    async with bench.box() as one, bench.box() as two:
        cookies = [(await box.exec(["python3", "-c", _CORE])).stdout for box in (one, one, two)]
        assert cookies[0] == cookies[1] != cookies[2], cookies
        assert b"0\n" not in cookies, cookies


async def unknown_classes_are_refused(bench: Bench) -> None:
    """A class that does not exist is refused before anything starts."""
    try:
        async with bench.box(scheduling="realtime"):
            pass
    except PolicyUnsupported:
        return
    raise AssertionError("the class realtime was accepted")


CHECKS = [
    Check(batch_is_idle, needs=("scheduling",)),
    Check(latency_is_ordinary),
    Check(batch_waits_for_others, needs=("scheduling",)),
    Check(cores_are_not_shared, needs=("core_scheduling",)),
    Check(unknown_classes_are_refused),
]
