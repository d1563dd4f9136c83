"""Memory, processes and disk: a limit that is hit is named, and harms only its own sandbox."""

from __future__ import annotations

from sandbox.base import Outcome, PolicyUnsupported, SandboxSpec
from sandbox.check import Bench, Check
from sandbox.checks.processes import processes

_HOG = "a = bytearray(600 << 20)"
_BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n"


async def memory_is_limited(bench: Bench) -> None:
    """Too much memory is outcome oom, and the next command runs."""
    async with bench.box(memory_mb=128) as box:
        result = await box.exec(["python3", "-c", _HOG])
        assert result.outcome is Outcome.OOM, result
        assert (await box.exec("echo on")).stdout == b"on\n"


async def memory_of_a_grandchild(bench: Bench) -> None:
    """Also when not the direct child but a process below it is killed."""
    async with bench.box(memory_mb=128) as box:
        result = await box.exec(f"python3 -c '{_HOG}' || exit 3")
        assert (result.outcome, result.exit_code) == (Outcome.OOM, 3), result


async def memory_of_many_together(bench: Bench) -> None:
    """The limit is the sandbox's, not each process's."""
    script = "for i in 1 2 3 4 5 6; do python3 -c 'a=bytearray(60<<20); import time; time.sleep(1)' & done; "
    script += "r=0; for j in $(jobs -p); do wait $j || r=1; done; exit $r"
    async with bench.box(memory_mb=128) as box:
        result = await box.exec(["bash", "-c", script])
        assert result.outcome is Outcome.OOM, result


async def fork_bomb_is_contained(bench: Bench) -> None:
    """A fork bomb ends at its timeout, leaves nothing, and the neighbour never notices."""
    async with bench.box() as box, bench.box() as neighbour:
        result = await box.exec(["python3", "-c", _BOMB], timeout=2)
        assert result.outcome is Outcome.TIMEOUT, result
        left = sum("os.fork" in line for line in await processes(box))
        assert left == 0, f"{left} processes of the bomb are left"
        assert (await neighbour.exec("echo on")).stdout == b"on\n"


async def processes_are_limited(bench: Bench) -> None:
    """A refused fork is outcome pids."""
    script = "import os\nfor _ in range(500):\n  if os.fork() == 0:\n    import time; time.sleep(20)\n"
    async with bench.box(pids=40) as box:
        result = await box.exec(["python3", "-c", script])
        assert result.outcome is Outcome.PIDS, result
        assert result.exit_code == 1, result


async def disk_is_limited(bench: Bench) -> None:
    """A full disk is outcome disk; deleting makes room again."""
    async with bench.box(disk_mb=20) as box:
        result = await box.exec("head -c 60000000 /dev/zero > fill")
        assert result.outcome is Outcome.DISK, result
        assert (await box.exec("rm fill; echo on > file; cat file")).stdout == b"on\n"


async def disk_limit_spans_all_folders(bench: Bench) -> None:
    """Work folder, /tmp and /dev/shm share one limit."""
    async with bench.box(disk_mb=20) as box:
        script = "for d in . /tmp /dev/shm; do head -c 9000000 /dev/zero > $d/fill || exit 1; done"
        result = await box.exec(script)
        assert result.outcome is Outcome.DISK, result


async def many_small_files_are_limited(bench: Bench) -> None:
    """Empty files count too."""
    script = "import os\nfor i in range(10**6):\n  open(f'/tmp/{i}', 'w').close()\n"
    async with bench.box(disk_mb=20, memory_mb=512) as box:
        result = await box.exec(["python3", "-c", script], timeout=60)
        assert result.outcome is Outcome.DISK, (result.outcome, result.stderr[-300:])


async def memory_is_not_swapped(bench: Bench) -> None:
    """The limit is the effective one: what exceeds it is killed, not swapped."""
    script = (
        "import mmap\n"
        "m = mmap.mmap(-1, 400 << 20)\n"
        "for i in range(0, 400 << 20, 4096): m[i] = 1\n"
        "print('all')\n"
    )
    async with bench.box(memory_mb=128) as box:
        result = await box.exec(["python3", "-c", script])
        assert result.outcome is Outcome.OOM, result
        assert b"all" not in result.stdout, "400 MiB fitted into 128"


async def default_limits_are_workable(bench: Bench) -> None:
    """A build's worth of processes, threads and open files fits the default limits."""
    script = (
        "import threading, time, tempfile, subprocess\n"
        "files = [tempfile.TemporaryFile() for _ in range(500)]\n"
        "threads = [threading.Thread(target=time.sleep, args=(1,)) for _ in range(60)]\n"
        "[t.start() for t in threads]\n"
        "children = [subprocess.Popen(['sleep', '1']) for _ in range(60)]\n"
        "print(sum(c.wait() for c in children))\n"
    )
    async with await bench.provider.create(SandboxSpec(image=bench.image, owner=bench.owner)) as box:
        result = await box.exec(["python3", "-c", script], timeout=60)
        assert (result.outcome, result.stdout) == (Outcome.EXITED, b"0\n"), result


async def impossible_limits_are_refused(bench: Bench) -> None:
    """A limit that makes no sense is refused before anything starts."""
    try:
        async with bench.box(memory_mb=0):
            pass
    except PolicyUnsupported:
        return
    raise AssertionError("memory_mb=0 was accepted")


CHECKS = [
    Check(memory_is_limited, needs=("memory_limit",)),
    Check(memory_of_a_grandchild, needs=("memory_limit",)),
    Check(memory_of_many_together, needs=("memory_limit",)),
    Check(fork_bomb_is_contained, needs=("pids_limit",)),
    Check(processes_are_limited, needs=("pids_limit",)),
    Check(disk_is_limited, needs=("disk_limit",)),
    Check(disk_limit_spans_all_folders, needs=("disk_limit_everywhere",)),
    Check(many_small_files_are_limited, needs=("disk_limit_everywhere",)),
    Check(memory_is_not_swapped, needs=("memory_limit",)),
    Check(default_limits_are_workable),
    Check(impossible_limits_are_refused),
]
