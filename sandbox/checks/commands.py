"""Running commands: results are data, output is complete, nothing outlives its end."""

from __future__ import annotations

import asyncio
import time

from sandbox.base import Outcome
from sandbox.check import Bench, Check
from sandbox.checks.processes import running, zombies


async def exit_code_is_data(bench: Bench) -> None:
    """A non-zero exit is a result, and both streams stay apart."""
    async with bench.box() as box:
        result = await box.exec("echo out; echo err >&2; exit 7")
        assert (result.outcome, result.exit_code, result.ok) == (Outcome.EXITED, 7, False), result
        assert (result.stdout, result.stderr) == (b"out\n", b"err\n"), result


async def signal_is_typed(bench: Bench) -> None:
    """Death by a signal has no exit code."""
    async with bench.box() as box:
        result = await box.exec("kill -TERM $$")
        assert (result.outcome, result.exit_code, result.signal) == (Outcome.SIGNALED, None, 15), result


async def list_is_argv(bench: Bench) -> None:
    """A list is no shell line; a missing program is exit 127 with its name."""
    async with bench.box() as box:
        result = await box.exec(["printf", "%s", "$HOME; ls | cat"])
        assert result.stdout == b"$HOME; ls | cat", result
        missing = await box.exec(["no-such-program"])
        assert missing.exit_code == 127, missing
        assert b"no-such-program" in missing.stderr, missing


async def stdin_environment_and_folder(bench: Bench) -> None:
    """Input, variables and working folder arrive byte for byte."""
    async with bench.box(env={"OUTER": "1"}) as box:
        result = await box.exec("cat; pwd; echo $A$OUTER", stdin=b"\xff\x00in ", cwd="/tmp", env={"A": "ü b"})
        assert result.stdout == b"\xff\x00in /tmp\n" + "ü b1\n".encode(), result


async def missing_stdin_is_empty(bench: Bench) -> None:
    """A command that reads input which nobody gave sees its end at once."""
    async with bench.box() as box:
        result = await box.exec("cat; echo end", timeout=5)
        assert result.stdout == b"end\n", result


async def unread_stdin_is_no_error(bench: Bench) -> None:
    """Megabytes of input that nobody reads neither block nor fail."""
    async with bench.box() as box:
        result = await box.exec("echo done", stdin=b"x" * 3_000_000, timeout=10)
        assert result.ok, result


async def users_have_their_ids(bench: Bench) -> None:
    """Commands run as the agent, ours as root when asked."""
    async with bench.box() as box:
        assert (await box.exec("id -u")).stdout == b"1000\n"
        assert (await box.exec("id -u", user="root")).stdout == b"0\n"


async def output_of_megabytes_is_bounded(bench: Bench) -> None:
    """Much output on both streams never blocks; head, tail and totals are kept."""
    script = "head -c 4000000 /dev/zero | tr '\\0' a; echo END; head -c 3000000 /dev/zero | tr '\\0' b >&2"
    async with bench.box() as box:
        result = await box.exec(script, max_output=10_000)
        assert result.ok, result.outcome
        assert (result.stdout_total, result.stderr_total) == (4_000_004, 3_000_000), result.stdout_total
        assert (len(result.stdout), len(result.stderr)) == (10_000, 10_000), len(result.stdout)
        assert result.stdout.startswith(b"aaa"), result.stdout[:9]
        assert result.stdout.endswith(b"aEND\n"), result.stdout[-9:]


async def output_within_the_bound_is_exact(bench: Bench) -> None:
    """Half a megabyte of bytes comes back equal."""
    async with bench.box() as box:
        script = "import sys; sys.stdout.buffer.write(bytes(i * i % 251 for i in range(500000)))"
        result = await box.exec(["python3", "-c", script])
        assert result.stdout == bytes(i * i % 251 for i in range(500_000)), result.stdout_total


async def silent_background_process(bench: Bench) -> None:
    """`server &` neither holds the call nor dies with it."""
    async with bench.box() as box:
        started = time.monotonic()
        result = await box.exec("sleep 300 & echo done")
        assert result.stdout == b"done\n", result
        assert time.monotonic() - started < 5, "the call waited for the background process"
        assert await running(box, "sleep 300") == 1, "the background process is gone"


async def chatty_background_process(bench: Bench) -> None:
    """A background process that writes for ever does not hold the call either, and may go on writing."""
    async with bench.box() as box:
        started = time.monotonic()
        result = await box.exec("(while sleep 0.05; do echo tick; echo t >> /tmp/ticks; done) & echo done")
        assert b"done" in result.stdout, result
        assert time.monotonic() - started < 6, "the call waited for the background process"
        before = len((await box.exec("cat /tmp/ticks")).stdout)
        await asyncio.sleep(0.5)
        assert len((await box.exec("cat /tmp/ticks")).stdout) > before, "it died of its closed pipe"


async def timeout_kills_the_tree(bench: Bench) -> None:
    """A timeout ends children, new sessions and double forks, and keeps the output so far."""
    script = "echo before; (setsid sh -c 'sleep 301 & sleep 302' &); setsid setsid sleep 303 & sleep 304"
    async with bench.box() as box:
        started = time.monotonic()
        result = await box.exec(script, timeout=0.7)
        assert (result.outcome, result.exit_code) == (Outcome.TIMEOUT, None), result
        assert result.stdout == b"before\n", result
        assert time.monotonic() - started < 6, "the timeout came late"
        for number in range(301, 305):
            assert await running(box, f"sleep {number}") == 0, f"sleep {number} outlived the timeout"


async def timeout_spares_the_neighbours(bench: Bench) -> None:
    """Only the command that ran out of time is killed."""
    async with bench.box() as box:
        await box.exec("sleep 305 >/dev/null 2>&1 &")
        other = asyncio.create_task(box.exec("sleep 1; echo survived"))
        await box.exec("sleep 306", timeout=0.3)
        assert (await other).stdout == b"survived\n"
        assert await running(box, "sleep 305") == 1, "an earlier background process was killed"


async def stubborn_process_dies_at_timeout(bench: Bench) -> None:
    """A process that ignores every signal it may ignore dies all the same."""
    script = (
        "import signal, time\n"
        "for s in range(1, 32):\n"
        "    if s not in (9, 19, 17): signal.signal(s, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    async with bench.box() as box:
        result = await box.exec(["python3", "-c", script], timeout=1.5)
        assert (result.outcome, result.stdout) == (Outcome.TIMEOUT, b"up\n"), result


async def cancelling_kills(bench: Bench) -> None:
    """Cancelling the awaiting task kills the command and what it started."""
    async with bench.box() as box:
        task = asyncio.create_task(box.exec("setsid sleep 307 & touch /tmp/started; sleep 308"))
        while not (await box.exec(["test", "-e", "/tmp/started"])).ok:
            await asyncio.sleep(0.01)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        else:
            raise AssertionError("the cancelled call returned")
        for _ in range(30):
            if await running(box, "sleep 307") + await running(box, "sleep 308") == 0:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the cancelled command still runs")


async def no_zombies(bench: Bench) -> None:
    """Orphans are reaped by the init of the sandbox."""
    async with bench.box() as box:
        for _ in range(3):
            await box.exec("for i in 1 2 3 4 5; do (sleep 0.01 &) ; done")
        await asyncio.sleep(0.3)
        assert await zombies(box) == 0


async def many_at_once(bench: Bench) -> None:
    """Twenty commands at the same time keep their outputs apart."""
    async with bench.box() as box:
        results = await asyncio.gather(*(box.exec(f"sleep 0.1; echo {n}") for n in range(20)))
        assert [result.stdout for result in results] == [f"{n}\n".encode() for n in range(20)], results


async def spawned_process_converses(bench: Bench) -> None:
    """A long-lived process answers line by line and ends with its input."""
    async with bench.box() as box:
        process = await box.spawn(["cat"])
        for word in (b"one\n", b"two\n", b"x" * 200_000 + b"\n"):
            writing = asyncio.create_task(process.write(word))
            assert await process.readline() == word, "an echoed line differs"
            await writing
        await process.close_stdin()
        assert await process.readline() == b"", "output after the end of input"
        assert (await process.wait()).exit_code == 0


async def spawned_process_is_killed(bench: Bench) -> None:
    """kill() ends a spawned process with everything below it."""
    async with bench.box() as box:
        process = await box.spawn("setsid sleep 309 & echo up; sleep 310")
        assert await process.readline() == b"up\n"
        await process.kill()
        assert (await process.wait()).outcome is Outcome.CANCELLED
        assert await running(box, "sleep 309") + await running(box, "sleep 310") == 0


CHECKS = [
    Check(function)
    for function in (
        exit_code_is_data, signal_is_typed, list_is_argv, stdin_environment_and_folder,
        missing_stdin_is_empty, unread_stdin_is_no_error, users_have_their_ids,
        output_of_megabytes_is_bounded, output_within_the_bound_is_exact, silent_background_process,
        chatty_background_process, timeout_kills_the_tree, timeout_spares_the_neighbours,
        stubborn_process_dies_at_timeout, cancelling_kills, no_zombies, many_at_once,
        spawned_process_converses, spawned_process_is_killed,
    )
]  # fmt: skip
