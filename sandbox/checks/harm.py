"""An agent against its own sandbox: it costs only that sandbox, and the result says whose doing it was."""

from __future__ import annotations

import time

from sandbox.base import ExecResult, Outcome, Repercussion, Sandbox, SandboxLost
from sandbox.check import Bench, Check

_BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n"


async def _attempt(box: Sandbox, command: str, *, user: str | None = None) -> ExecResult | SandboxLost:
    try:
        return await box.exec(command, user=user, timeout=30)
    except SandboxLost as lost:
        return lost


async def _fine(box: Sandbox) -> None:
    assert (await box.exec("echo on > file && cat file && ls /bin/sh")).stdout == b"on\n/bin/sh\n", (
        "the neighbour"
    )


async def deleting_the_system(bench: Bench) -> None:
    """Deleting /usr and /bin as root either fails or is the sandbox's own repercussion."""
    async with bench.box() as box, bench.box() as neighbour:
        await _attempt(
            box, "rm -rf --no-preserve-root /usr/bin /usr/lib /usr/sbin /bin /lib /lib64", user="root"
        )
        seen = await _attempt(box, "echo on")
        assert seen.repercussion is Repercussion.SYSTEM or (isinstance(seen, ExecResult) and seen.ok), seen
        await _fine(neighbour)
    async with bench.box() as again:
        await _fine(again)


async def deleting_the_work_folder(bench: Bench) -> None:
    """A sandbox whose work folder is gone says so; it is no fault of ours."""
    async with bench.box() as box, bench.box() as neighbour:
        await _attempt(box, "cd / && rm -rf /workspace", user="root")
        seen = await _attempt(box, "echo on")
        assert seen.repercussion is Repercussion.SYSTEM, seen
        await _fine(neighbour)


async def leaving_a_fork_bomb(bench: Bench) -> None:
    """A bomb left in the background fills only its own limit: later commands end as pids, with its cause."""
    async with bench.box() as box, bench.box() as neighbour:
        await box.write("bomb.py", _BOMB.encode())
        await _attempt(box, "python3 bomb.py >/dev/null 2>&1 & sleep 1")
        attempt = "for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait"
        seen = await _attempt(box, attempt)
        for _ in range(20):
            if seen.repercussion is not None:
                break
            seen = await _attempt(box, attempt)
        assert seen.repercussion is Repercussion.PROCESSES, seen
        if isinstance(seen, ExecResult):
            assert seen.outcome is Outcome.PIDS, seen
        started = time.monotonic()
        await _fine(neighbour)
        assert time.monotonic() - started < 20, "the neighbour hardly runs"
        await box.close()
        await _fine(neighbour)


async def filling_the_disk(bench: Bench) -> None:
    """A full disk is named, stays the sandbox's own, and goes when files go."""
    async with bench.box(disk_mb=20) as box, bench.box(disk_mb=20) as neighbour:
        seen = await _attempt(box, "head -c 60000000 /dev/zero > fill")
        assert seen.repercussion is Repercussion.DISK, seen
        await _fine(neighbour)
        seen = await _attempt(box, "rm fill; echo on")
        assert isinstance(seen, ExecResult), seen
        assert (seen.ok, seen.repercussion) == (True, None), seen


async def killing_the_first_process(bench: Bench) -> None:
    """kill -9 of PID 1 and of everything leaves a sandbox that works, or one whose loss is its own doing."""
    for user in ("agent", "root"):
        async with bench.box() as box, bench.box() as neighbour:
            await _attempt(box, "kill -9 1; kill -9 -1", user=user)
            seen = await _attempt(box, "echo on")
            worked = isinstance(seen, ExecResult) and seen.ok
            assert worked or seen.repercussion is Repercussion.INIT, f"{user}: {seen}"
            await _fine(neighbour)


async def eating_all_memory_in_files(bench: Bench) -> None:
    """Files in memory count against the sandbox's limits; the neighbour and the host keep theirs."""
    script = "for d in /dev/shm /tmp .; do head -c 300000000 /dev/zero > $d/fill; done; echo end; exit 1"
    async with bench.box(memory_mb=128, disk_mb=64) as box, bench.box() as neighbour:
        seen = await _attempt(box, script)
        outcomes = (Outcome.DISK, Outcome.OOM, Outcome.LOST)
        assert isinstance(seen, SandboxLost) or seen.outcome in outcomes, seen
        await _fine(neighbour)


async def our_own_end_is_no_repercussion(bench: Bench) -> None:
    """A sandbox that we closed under a command is lost without anybody's guilt."""
    async with bench.box() as box:
        process = await box.spawn("echo up; sleep 322")
        assert await process.readline() == b"up\n"
        await box.close()
        result: ExecResult | SandboxLost
        try:
            result = await process.wait()
        except SandboxLost as lost:
            result = lost
    assert result.repercussion is None, result
    assert isinstance(result, SandboxLost) or result.outcome in (Outcome.LOST, Outcome.CANCELLED), result


CHECKS = [
    Check(deleting_the_system),
    Check(deleting_the_work_folder),
    Check(leaving_a_fork_bomb, needs=("pids_limit",)),
    Check(filling_the_disk, needs=("disk_limit",)),
    Check(killing_the_first_process),
    Check(eating_all_memory_in_files, needs=("memory_limit",)),
    Check(our_own_end_is_no_repercussion),
]
