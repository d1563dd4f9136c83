"""Output and status to the last byte: what shells, terminals, proxies and daemons are known to lose."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator

from sandbox.base import Outcome
from sandbox.check import Bench, Check


async def short_output_is_never_lost(bench: Bench) -> None:
    """A line written just before the exit arrives, every time, on both streams."""
    async with bench.box() as box:
        for number in range(60):
            result = await box.exec(["sh", "-c", f"echo o{number}; echo e{number} >&2"])
            wanted = (f"o{number}\n".encode(), f"e{number}\n".encode())
            assert (result.stdout, result.stderr) == wanted, f"command {number}: {result}"


async def pauses_are_not_the_end(bench: Bench) -> None:
    """Output in several flushes with pauses between is one output, and its status the last."""
    async with bench.box() as box:
        result = await box.exec("for i in 1 2 3; do echo $i; sleep 0.3; done; exit 5")
        assert (result.stdout, result.exit_code) == (b"1\n2\n3\n", 5), result


async def closed_streams_still_have_a_status(bench: Bench) -> None:
    """A command that closes its streams and works on is waited for."""
    async with bench.box() as box:
        started = time.monotonic()
        result = await box.exec("exec >&- 2>&- <&-; sleep 0.5; exit 9")
        assert (result.outcome, result.exit_code) == (Outcome.EXITED, 9), result
        assert time.monotonic() - started >= 0.5, "the status came before the end"


async def every_exit_code_is_itself(bench: Bench) -> None:
    """Codes that shells and tools use for signals and timeouts are codes, not signals, timeouts or losses."""
    async with bench.box() as box:
        for code in (1, 2, 124, 125, 126, 128, 130, 134, 137, 139, 143, 255):
            result = await box.exec(f"exit {code}")
            assert (result.outcome, result.exit_code) == (Outcome.EXITED, code), result


async def output_is_not_translated(bench: Bench) -> None:
    """Carriage returns, control characters, escapes and odd bytes come as they were written."""
    data = bytes(range(256)) + b"\r\n\r\n\x1b[31mred\x1b[0m\x04\x03\x00 end\r\n"
    async with bench.box() as box:
        result = await box.exec(["cat"], stdin=data)
        assert result.stdout == data, result.stdout
        assert (await box.exec(["sh", "-c", "printf 'a\\r\\nb\\n'"])).stdout == b"a\r\nb\n"


async def no_terminal_unless_asked(bench: Bench) -> None:
    """No stream of a command is a terminal, and none controls it."""
    async with bench.box() as box:
        result = await box.exec(
            "for i in 0 1 2; do test -t $i && echo terminal $i; done; (: < /dev/tty) && echo c"
        )
        assert b"terminal" not in result.stdout, result
        assert b"c\n" not in result.stdout, result


async def partial_output_of_megabytes(bench: Bench) -> None:
    """What was written before a timeout is there, on both streams, also when it is much."""
    script = "head -c 700000 /dev/zero; head -c 300000 /dev/zero >&2; echo last; echo last >&2; sleep 313"
    async with bench.box() as box:
        result = await box.exec(script, timeout=3)
        assert result.outcome is Outcome.TIMEOUT, result.outcome
        assert (result.stdout_total, result.stderr_total) == (700_005, 300_005), result.stdout_total
        assert result.stdout.endswith(b"last\n"), result.stdout[-9:]
        assert result.stderr.endswith(b"last\n"), result.stderr[-9:]


async def slow_reader_loses_nothing(bench: Bench) -> None:
    """A process that writes faster than its reader reads waits; no byte is dropped."""
    script = "import sys\nfor i in range(60000): print(i, 'x' * 60)\n"
    async with bench.box() as box:
        process = await box.spawn(["python3", "-c", script])
        await asyncio.sleep(1)
        for number in range(60_000):
            line = await process.readline()
            assert line == f"{number} {'x' * 60}\n".encode(), f"line {number} is {line[:40]!r}"
        assert (await process.wait()).exit_code == 0


async def both_streams_of_a_process(bench: Bench) -> None:
    """Iterating a process gives both streams whole, each in its order."""
    script = "for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done; exit 3"
    async with bench.box() as box:
        process = await box.spawn(script)
        seen = {"stdout": b"", "stderr": b""}
        async for chunk in process:
            seen[chunk.stream] += chunk.data
        assert seen["stdout"] == b"o1\no2\no3\no4\no5\n", seen
        assert seen["stderr"] == b"e1\ne2\ne3\ne4\ne5\n", seen
        assert (await process.wait()).exit_code == 3


async def input_of_megabytes_arrives(bench: Bench) -> None:
    """Thirty megabytes of input, in one piece or as a stream, are read to the last byte."""
    data = os.urandom(1 << 20) * 30
    wanted = hashlib.sha256(data).hexdigest().encode()

    async def blocks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 777_777):
            yield data[at : at + 777_777]
            await asyncio.sleep(0)

    async with bench.box() as box:
        for stdin in (data, blocks()):
            result = await box.exec(["sha256sum"], stdin=stdin, timeout=120)
            assert result.stdout.split()[:1] == [wanted], result


async def later_commands_survive_a_zombie(bench: Bench) -> None:
    """A child that nobody waits for, and one that is stopped, hold no later command."""
    script = "import os, time\nif os.fork() == 0: os._exit(0)\nprint('up', flush=True)\ntime.sleep(314)\n"
    async with bench.box() as box:
        process = await box.spawn(["python3", "-c", script])
        assert await process.readline() == b"up\n"
        await box.exec("sleep 315 & kill -STOP $!")
        for number in range(5):
            started = time.monotonic()
            assert (await box.exec(f"echo {number}", timeout=10)).stdout == f"{number}\n".encode()
            assert time.monotonic() - started < 5, "a command waited for a foreign zombie"


async def repeated_timeouts_exhaust_nothing(bench: Bench) -> None:
    """Commands that time out leave no process behind that later ones run into."""
    async with bench.box(pids=40) as box:
        for _ in range(6):
            result = await box.exec(
                "for i in 1 2 3 4 5 6 7 8; do setsid sleep 316 & done; sleep 317", timeout=0.4
            )
            assert result.outcome is Outcome.TIMEOUT, result
        assert (
            await box.exec("for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait; echo on")
        ).stdout == b"on\n"


async def burst_of_commands(bench: Bench) -> None:
    """A hundred commands at once over five sandboxes: every status and output is its own."""
    async with bench.box() as a, bench.box() as b, bench.box() as c, bench.box() as d, bench.box() as e:
        gate = asyncio.Semaphore(40)

        async def one(number: int) -> tuple[bytes, int | None]:
            async with gate:
                result = await (a, b, c, d, e)[number % 5].exec(
                    f"echo {number}; exit {number % 50}", timeout=60
                )
                return result.stdout, result.exit_code

        results = await asyncio.gather(*(one(number) for number in range(100)))
        assert results == [(f"{n}\n".encode(), n % 50) for n in range(100)], results


def _descriptors() -> int:
    """How many this process holds (a client need not have /proc)."""
    count = 0
    for fd in range(4096):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            count += 1
    return count


async def descriptors_do_not_leak(bench: Bench) -> None:
    """After many commands, transfers and cancelled calls the client holds no more descriptors than before."""
    async with bench.box() as box:

        async def round() -> None:
            await box.exec("echo x", stdin=b"y")
            await box.write("file", b"data")
            await box.read("file")
            process = await box.spawn(["cat"])
            await process.close_stdin()
            await process.wait()
            task = asyncio.create_task(box.exec("sleep 318"))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await round()
        before = _descriptors()
        for _ in range(8):
            await round()
        await asyncio.sleep(0.2)
        after = _descriptors()
        assert after <= before + 2, f"{before} descriptors became {after}"


CHECKS = [
    Check(function)
    for function in (
        short_output_is_never_lost, pauses_are_not_the_end, closed_streams_still_have_a_status,
        every_exit_code_is_itself, output_is_not_translated, no_terminal_unless_asked,
        partial_output_of_megabytes, slow_reader_loses_nothing, both_streams_of_a_process,
        input_of_megabytes_arrives, later_commands_survive_a_zombie, repeated_timeouts_exhaust_nothing,
        burst_of_commands, descriptors_do_not_leak,
    )
]  # fmt: skip
