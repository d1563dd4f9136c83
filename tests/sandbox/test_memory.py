"""Keys, tags and leases: what a killed client finds again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from sandbox.base import KeyReused, Outcome, SandboxLost, SandboxSpec, Size
from sandbox.checks.processes import running
from sandbox.log import SandboxLog
from sandbox.namespace import NamespaceProvider, NamespaceSandbox
from sandbox.namespace.probe import start_time

CLIENT = """
import asyncio, sys
from pathlib import Path
from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider
async def main():
    provider = NamespaceProvider(Path(sys.argv[1]))
    spec = SandboxSpec(image=provider.images.host_base(), owner="mortal", lease_s=float(sys.argv[2]))
    box = await provider.create(spec)
    await box.exec("echo first >> story; cat story", key="one")
    await box.spawn("echo up; read line; echo $line; exec sleep 4100", tag="server")
    second = "touch began; sleep 1; echo second >> story; cat story"
    running = asyncio.create_task(box.exec(second, key="two"))
    while not (await box.exec("test -e began")).ok:
        pass
    print(box.id, provider._nodelet.pid, flush=True)
    await running
    await asyncio.sleep(100)
asyncio.run(main())
"""


async def killed_client(store: Path, lease: float) -> tuple[str, int]:
    """(id of the sandbox, pid of the nodelet) that a client left behind when it was killed."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(store), str(lease), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert client.stdout is not None
    id, nodelet = (await client.stdout.readline()).decode().split()
    client.kill()
    await client.wait()
    return id, int(nodelet)


async def test_a_new_client_finds_what_the_killed_one_had(store: Path, provider: NamespaceProvider) -> None:
    id, nodelet = await killed_client(store, 30)
    (info,) = await provider.list("mortal")
    assert (info.id, info.orphan) == (id, True)
    assert await provider.reap("mortal") == 0, "a leased sandbox was reaped"
    box = await provider.attach(id)
    one = await box.exec("echo first >> story; cat story", key="one")
    assert (one.stdout, one.replayed) == (b"first\n", True)
    two = await box.exec("touch began; sleep 1; echo second >> story; cat story", key="two")
    assert (two.stdout, two.replayed) == (b"first\nsecond\n", True)
    assert (await box.exec("cat story")).stdout == b"first\nsecond\n", "a keyed command ran twice"
    server = await box.process("server")
    await server.write(b"hello\n")
    assert [await server.readline() for _ in range(2)] == [b"up\n", b"hello\n"]
    await box.close()
    assert start_time(nodelet) is None or await gone(nodelet)
    assert await provider.list("mortal") == []
    with pytest.raises(SandboxLost):
        await provider.attach(id)


async def gone(pid: int) -> bool:
    async with asyncio.timeout(20):
        while start_time(pid) is not None:
            await asyncio.sleep(0.02)
    return True


async def test_a_lease_ends_by_itself(store: Path, provider: NamespaceProvider) -> None:
    id, nodelet = await killed_client(store, 2.5)
    box = await provider.attach(id)
    await asyncio.sleep(3.0)
    assert await box.alive(), "the lease ended under an heir"
    box._channel.close()  # as if the heir had been killed too
    assert await gone(nodelet)
    assert await provider.list("mortal") == []


async def test_a_key_runs_once(box: NamespaceSandbox) -> None:
    first = await box.exec("echo x >> n; wc -l < n; echo bad >&2; exit 3", key="k")
    again = await box.exec("echo x >> n; wc -l < n; echo bad >&2; exit 3", key="k", timeout=5)
    assert (first.stdout, first.stderr, first.exit_code, first.replayed) == (b"1\n", b"bad\n", 3, False)
    assert (again.stdout, again.stderr, again.exit_code, again.replayed) == (b"1\n", b"bad\n", 3, True)
    with pytest.raises(KeyReused):
        await box.exec("echo other", key="k")
    with pytest.raises(KeyReused):
        await box.exec("echo x >> n; wc -l < n; echo bad >&2; exit 3", key="k", user="root")
    fed = await box.exec("cat", key="fed", stdin=b"\xff" * 300_000)
    assert fed.stdout == b"\xff" * 300_000
    assert (await box.exec("cat", key="fed", stdin=b"\xff" * 300_000)).replayed
    with pytest.raises(KeyReused):
        await box.exec("cat", key="fed", stdin=b"other")


async def test_at_once_a_key_runs_once(box: NamespaceSandbox) -> None:
    results = await asyncio.gather(
        *(box.exec("echo x >> n; sleep 0.3; wc -l < n", key="k") for _ in range(8))
    )
    assert [result.stdout for result in results] == [b"1\n"] * 8
    assert sum(not result.replayed for result in results) == 1


async def test_keyed_commands_time_out_drain_and_leave_background_processes(box: NamespaceSandbox) -> None:
    slow = await box.exec("echo before; setsid sleep 4200 & sleep 4201", key="slow", timeout=0.5)
    assert (slow.outcome, slow.stdout) == (Outcome.TIMEOUT, b"before\n")
    assert await running(box, "sleep 4200") == 0
    left = await box.exec("sleep 4202 & head -c 3000000 /dev/zero; echo END", key="left", max_output=1000)
    assert (left.stdout_total, len(left.stdout), left.stdout[-4:]) == (3_000_004, 1000, b"END\n")
    assert await running(box, "sleep 4202") == 1


async def test_a_cancelled_key_may_run_again(box: NamespaceSandbox) -> None:
    command = "echo x >> n; test $(wc -l < n) -gt 1 || sleep 4300; echo done"
    task = asyncio.create_task(box.exec(command, key="k"))
    while not (await box.exec("test -e n")).ok:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await running(box, "sleep 4300") == 0
    again = await box.exec(command, key="k")
    assert (again.stdout, again.replayed) == (b"done\n", False)


async def test_a_killed_monitor_is_no_lost_key(box: NamespaceSandbox) -> None:
    result = await box.exec("kill -9 -1; sleep 5", key="k", user="root")
    assert result.outcome is Outcome.SIGNALED
    again = await box.exec("kill -9 -1; sleep 5", key="k", user="root")
    assert (again.outcome, again.replayed) == (Outcome.SIGNALED, True)
    assert (await box.exec("echo on")).ok


async def test_a_terminal(box: NamespaceSandbox) -> None:
    shell = await box.spawn(["/bin/sh"], pty=Size(30, 100), env={"PS1": "$ "})
    await shell.write(b"stty size; tty; id -u\n")
    seen = b""
    async with asyncio.timeout(10):
        while b"1000" not in seen:
            seen += await shell.readline()
    assert b"30 100" in seen
    assert b"/dev/pts/" in seen
    await shell.resize(Size(50, 132))
    await shell.write(b"stty size; sleep 4500\n")
    async with asyncio.timeout(10):
        while b"50 132" not in seen:
            seen += await shell.readline()
        while await running(box, "sleep 4500") == 0:
            await asyncio.sleep(0.02)
        await shell.write(b"\x03")
        await shell.write(b"echo status $?\n")
        while b"status 130" not in seen:
            seen += await shell.readline()
    await shell.close_stdin()
    assert (await shell.wait()).exit_code in (0, 130)


async def test_tags_are_attached_again(box: NamespaceSandbox, provider: NamespaceProvider) -> None:
    script = "echo one; echo err >&2; read a; echo $a; read b; echo $b; exit 4"
    first = await box.spawn(script, tag="t")
    assert await first.readline() == b"one\n"
    await first.detach()
    with pytest.raises(ValueError, match="choose a new one"):
        await box.spawn("true", tag="t")
    with pytest.raises(KeyError):
        await box.process("nonsense")
    second = await box.process("t")
    await second.write(b"A\n")
    assert [await second.readline() for _ in range(2)] == [b"one\n", b"A\n"]
    third = await box.process("t", offset=len(b"one\nerr\nA\n"))
    assert await second.readline() == b""
    await third.write(b"B\n")
    seen = [chunk async for chunk in third]
    assert b"".join(chunk.data for chunk in seen) == b"B\n"
    assert (await third.wait()).exit_code == 4
    late = await box.process("t")
    seen = [chunk async for chunk in late]
    streams = {name: b"".join(c.data for c in seen if c.stream == name) for name in ("stdout", "stderr")}
    assert streams == {"stdout": b"one\nA\nB\n", "stderr": b"err\n"}
    assert (await late.wait()).exit_code == 4
    assert [(each.tag, each.running) for each in await box.processes()] == [("t", False)]


async def test_a_tagged_process_feels_its_slow_reader_and_loses_nothing(box: NamespaceSandbox) -> None:
    script = "import sys\nfor i in range(40000): print(i, 'x' * 90)\n"
    process = await box.spawn(["python3", "-c", script], tag="big")
    await asyncio.sleep(0.3)
    lines = [await process.readline() for _ in range(40_000)]
    assert lines == [f"{i} {'x' * 90}\n".encode() for i in range(40_000)]
    assert (await process.wait()).ok


async def test_signals_reach_the_group(box: NamespaceSandbox) -> None:
    for tag in (None, "t"):
        process = await box.spawn(
            "trap 'echo got; exit 9' TERM; echo up; while :; do sleep 0.05; done", tag=tag
        )
        assert await process.readline() == b"up\n"
        await process.signal(signal.SIGTERM)
        assert await process.readline() == b"got\n"
        assert (await process.wait()).exit_code == 9


async def test_both_streams_as_they_come(box: NamespaceSandbox) -> None:
    script = "for i in 1 2 3; do echo o$i; echo e$i >&2; done; head -c 3000000 /dev/zero >&2; exit 2"
    process = await box.spawn(script)
    seen = {"stdout": b"", "stderr": b""}
    async for chunk in process:
        seen[chunk.stream] += chunk.data
    assert seen["stdout"] == b"o1\no2\no3\n"
    assert seen["stderr"] == b"e1\ne2\ne3\n" + bytes(3_000_000)
    assert (await process.wait()).exit_code == 2


async def test_what_came_before_the_reader_began_is_kept(box: NamespaceSandbox) -> None:
    process = await box.spawn("head -c 500000 /dev/zero >&2; echo up; head -c 900000 /dev/zero >&2")
    await asyncio.sleep(0.5)
    sizes = {"stdout": 0, "stderr": 0}
    async for chunk in process:
        sizes[chunk.stream] += len(chunk.data)
    assert sizes["stdout"] == 3
    assert sizes["stderr"] in (1_400_000, 65_536), "beyond a megabyte nobody seems to want it"
    quick = await box.spawn("head -c 700000 /dev/zero >&2; echo up")
    await asyncio.sleep(0.5)
    seen = [chunk async for chunk in quick]
    assert sum(len(chunk.data) for chunk in seen) == 700_003


async def test_the_log_tells_the_story(box: NamespaceSandbox, store: Path) -> None:
    await box.write("in.txt", b"data")
    await box.exec("cat in.txt; exit 5", stdin=b"typed")
    await box.exec("echo keyed", key="k")
    process = await box.spawn(["cat"])
    await process.close_stdin()
    await process.wait()
    with pytest.raises(FileNotFoundError):
        await box.read("nothing")
    with pytest.raises(IsADirectoryError):
        await box.write("/tmp", b"x")
    image = await box.snapshot()
    log = SandboxLog(store, box.id)
    entries = log.entries()
    log.close()
    assert [entry.operation for entry in entries] == ["write", "exec", "exec", "spawn", "write", "snapshot"]
    assert entries[1].result is not None
    assert (entries[1].result.exit_code, entries[1].result.stdout) == (5, b"data")
    assert entries[2].key == "k"
    assert all(entry.result is not None and entry.result.ok for entry in entries[2:4])
    assert "IsADirectoryError" in (entries[4].end or {})["error"]
    assert (entries[5].end or {})["image"] == image


async def test_fork_shares_files_and_nothing_else(box: NamespaceSandbox) -> None:
    await box.exec("echo shared > file; sleep 4400 >/dev/null 2>&1 & echo $!")
    one, two = await box.fork(2)
    await one.exec("echo one >> file")
    await two.exec("echo two >> file")
    assert (await box.exec("cat file")).stdout == b"shared\n"
    assert (await one.exec("cat file")).stdout == b"shared\none\n"
    assert (await two.exec("cat file")).stdout == b"shared\ntwo\n"
    assert await running(one, "sleep 4400") == 0
    assert one.spec.memory_mb == box.spec.memory_mb
    await one.close()
    await two.close()


async def test_unusable_leases_are_refused(provider: NamespaceProvider) -> None:
    from sandbox.base import PolicyUnsupported

    with pytest.raises(PolicyUnsupported, match="lease_s"):
        await provider.create(SandboxSpec(image=provider.images.host_base(), lease_s=-1))
