from __future__ import annotations

import asyncio
import time

import pytest

from sandbox.base import Outcome
from sandbox.checks.processes import processes, running
from sandbox.namespace import NamespaceSandbox


async def test_exit_codes_and_streams_are_data(box: NamespaceSandbox) -> None:
    result = await box.exec("echo out; echo err >&2; exit 7")
    assert (result.outcome, result.exit_code, result.ok) == (Outcome.EXITED, 7, False)
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


async def test_argv_is_not_a_shell(box: NamespaceSandbox) -> None:
    result = await box.exec(["printf", "%s", "$HOME; ls"])
    assert result.stdout == b"$HOME; ls"
    missing = await box.exec(["no-such-program"])
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr


async def test_stdin_environment_folder_and_user(box: NamespaceSandbox) -> None:
    result = await box.exec("cat; pwd; echo $A; id -u", stdin=b"in ", cwd="/tmp", env={"A": "ü b"})
    assert result.stdout.decode() == "in /tmp\nü b\n1000\n"
    assert (await box.exec("id -u", user="root")).stdout == b"0\n"


async def test_megabytes_of_output_keep_head_and_tail(box: NamespaceSandbox) -> None:
    script = "head -c 5000000 /dev/zero | tr '\\0' a; echo END; head -c 300000 /dev/zero | tr '\\0' b >&2"
    result = await box.exec(script, max_output=10_000)
    assert result.ok
    assert result.stdout_total == 5_000_004
    assert result.stderr_total == 300_000
    assert len(result.stdout) == 10_000
    assert result.stdout.startswith(b"aaa")
    assert result.stdout.endswith(b"aEND\n")


async def test_timeout_kills_the_tree_and_keeps_output(box: NamespaceSandbox) -> None:
    script = "echo before; (setsid sh -c 'sleep 61 & sleep 62' &) ; setsid setsid sleep 63 & sleep 60"
    started = time.monotonic()
    result = await box.exec(script, timeout=0.5)
    assert result.outcome is Outcome.TIMEOUT
    assert result.exit_code is None
    assert result.stdout == b"before\n"
    assert time.monotonic() - started < 5
    assert not [line for line in await processes(box) if line.startswith("sleep")]


async def test_background_process_does_not_hold_the_call(box: NamespaceSandbox) -> None:
    started = time.monotonic()
    result = await box.exec("(while sleep 0.05; do echo tick; done) & sleep 30 & echo done; echo $!")
    assert result.ok
    assert b"done" in result.stdout
    assert time.monotonic() - started < 4
    assert await running(box, "sleep 30") == 1


async def test_cancelling_kills_the_command(box: NamespaceSandbox) -> None:
    task = asyncio.create_task(box.exec("touch /tmp/started; setsid sleep 77 & sleep 78"))
    while b"started" not in (await box.exec("ls /tmp")).stdout:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not [line for line in await processes(box) if line.startswith("sleep 7")]:
            return
        await asyncio.sleep(0.02)
    pytest.fail("the cancelled command still runs")


async def test_spawned_process_talks_line_by_line(box: NamespaceSandbox) -> None:
    process = await box.spawn(["cat"])
    for word in (b"one\n", b"two\n"):
        await process.write(word)
        assert await process.readline() == word
    await process.close_stdin()
    assert await process.readline() == b""
    assert (await process.wait()).exit_code == 0
