"""What a sandbox remembers: keys, tags, terminals, and its log."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

from sandbox.base import KeyReused, Outcome, Process, Size
from sandbox.check import Bench, Check
from sandbox.checks.processes import running
from sandbox.log import SandboxLog

_SECONDS = 20.0


async def _until(process: Process, text: bytes) -> bytes:
    """Read until `text` was seen."""
    seen = b""
    async with asyncio.timeout(_SECONDS):
        while text not in seen:
            data = await process.read_exactly(1)
            seen += data
    return seen


async def a_key_runs_once(bench: Bench) -> None:
    """The second command of a key is the first one's result."""
    async with bench.box() as box:
        command = "echo x >> n; wc -l < n; echo bad >&2; exit 3"
        first, again = await box.exec(command, key="k"), await box.exec(command, key="k")
        assert (first.replayed, again.replayed) == (False, True), (first, again)
        for result in (first, again):
            assert (result.stdout.strip(), result.stderr, result.exit_code) == (b"1", b"bad\n", 3), result
        assert (await box.exec("wc -l < n")).stdout.strip() == b"1", "a keyed command ran twice"


async def at_once_a_key_runs_once(bench: Bench) -> None:
    """Six calls of one key at the same time are one run."""
    async with bench.box() as box:
        command = "echo x >> n; sleep 0.3; wc -l < n"
        results = await asyncio.gather(*(box.exec(command, key="k") for _ in range(6)))
        assert [result.stdout.strip() for result in results] == [b"1"] * 6, results
        assert (await box.exec("wc -l < n")).stdout.strip() == b"1", "a keyed command ran twice"


async def a_key_names_one_command(bench: Bench) -> None:
    """Another command, folder, user or input under a used key is an error, and nothing runs."""
    async with bench.box() as box:
        await box.exec(["cat"], key="k", stdin=b"in")
        usual: dict[str, Any] = {"argv": ["cat"], "stdin": b"in", "key": "k"}
        others: list[dict[str, Any]] = [
            {"argv": "touch ran"}, {"stdin": b"other"}, {"cwd": "/tmp"}, {"env": {"A": "1"}},
            {"user": "root"},
        ]  # fmt: skip
        for number, other in enumerate(others):
            try:
                await box.exec(**{**usual, **other})
            except KeyReused:
                continue
            raise AssertionError(f"attempt {number} was accepted")
        assert not (await box.exec("test -e ran")).ok


async def keyed_results_are_whole(bench: Bench) -> None:
    """Bytes, bounds, timeouts and signals of keyed commands are those of other commands."""
    async with bench.box() as box:
        script = "head -c 300000 /dev/zero | tr '\\0' a; printf '\\377END'"
        for _ in range(2):
            result = await box.exec(script, key="big", max_output=1000)
            assert (result.stdout_total, len(result.stdout)) == (300_004, 1000), result.stdout_total
            assert result.stdout.endswith(b"\xffEND"), result.stdout[-9:]
            slow = await box.exec("echo so far; setsid sleep 319 & sleep 320", key="slow", timeout=0.6)
            assert (slow.outcome, slow.stdout) == (Outcome.TIMEOUT, b"so far\n"), slow
            killed = await box.exec("kill -TERM $$", key="killed")
            assert (killed.outcome, killed.signal) == (Outcome.SIGNALED, 15), killed
        assert await running(box, "sleep 319") == 0, "a keyed command outlived its timeout"


async def keys_are_the_sandboxs_own(bench: Bench) -> None:
    """The same key in another sandbox is another command."""
    async with bench.box() as one, bench.box() as two:
        assert (await one.exec("echo one", key="k")).stdout == b"one\n"
        result = await two.exec("echo two", key="k")
        assert (result.stdout, result.replayed) == (b"two\n", False), result


async def the_log_is_ordered_and_complete(bench: Bench) -> None:
    """Commands, transfers and their results are in the log in the order in which they began."""
    async with bench.box() as box:
        await box.write("in.txt", b"data")
        await box.exec("cat in.txt; exit 5")
        await box.exec("echo keyed", key="k")
        with contextlib.suppress(OSError):
            await box.write("/tmp", b"not a file")
        log = SandboxLog(bench.provider.images.root, box.id)
        entries = log.entries()
        spec = log.spec
        log.close()
    assert spec == box.spec, (spec, box.spec)
    assert [entry.operation for entry in entries] == ["write", "exec", "exec", "write"], entries
    assert entries[1].result is not None, "a result is missing"
    assert (entries[1].result.stdout, entries[1].result.exit_code) == (b"data", 5), entries[1].result
    assert (entries[2].key, entries[2].result is not None) == ("k", True), entries[2]
    assert entries[3].end is not None, "the end of a failed call is missing"
    assert "error" in entries[3].end, entries[3].end


async def a_terminal_when_asked(bench: Bench) -> None:
    """A pseudo-terminal controls its process, has the size that was asked for, and can be resized."""
    async with bench.box() as box:
        shell = await box.spawn(["/bin/sh"], pty=Size(30, 100), env={"PS1": "$ "})
        await shell.write(b"stty size; test -t 0 && test -t 1 && (: </dev/tty) && echo has-$((40+2))\n")
        seen = await _until(shell, b"has-42")
        assert b"30 100" in seen, seen
        await shell.resize(Size(50, 132))
        await shell.write(b"stty size\n")
        await _until(shell, b"50 132")
        await shell.kill()
        assert (await shell.wait()).outcome is Outcome.CANCELLED


async def a_terminal_interrupts(bench: Bench) -> None:
    """Control-C ends what runs in the foreground and nothing else; control-D ends the shell."""
    async with bench.box() as box:
        shell = await box.spawn(["/bin/sh"], pty=Size(), env={"PS1": "$ "})
        await shell.write(b"sleep 321\n")
        async with asyncio.timeout(_SECONDS):
            while await running(box, "sleep 321") == 0:
                await asyncio.sleep(0.02)
        await shell.write(b"\x03")
        await shell.write(b"echo status $?\n")
        await _until(shell, b"status 130")
        assert await running(box, "sleep 321") == 0
        await shell.close_stdin()
        async with asyncio.timeout(_SECONDS):
            assert (await shell.wait()).outcome is Outcome.EXITED


async def a_tag_is_attached_again(bench: Bench) -> None:
    """A tagged process lives on when its client lets go; the next one reads on where he wants to."""
    async with bench.box() as box:
        first = await box.spawn("echo one; read a; echo $a; read b; echo $b; exit 4", tag="t")
        assert await first.readline() == b"one\n"
        await first.detach()
        second = await box.process("t")
        await second.write(b"A\n")
        assert [await second.readline() for _ in range(2)] == [b"one\n", b"A\n"], "kept output differs"
        third = await box.process("t", offset=len("one\nA\n"))
        assert await second.readline() == b"", "two clients are attached"
        await third.write(b"B\n")
        assert await third.readline() == b"B\n"
        assert (await third.wait()).exit_code == 4


async def an_ended_tag_still_answers(bench: Bench) -> None:
    """What a tagged process wrote, and how it ended, can be had after its end; its tag is its own."""
    async with bench.box() as box:
        process = await box.spawn("echo out; echo err >&2; exit 6", tag="t")
        await process.detach()
        await asyncio.sleep(0.5)
        late = await box.process("t")
        assert await late.readline() == b"out\n"
        result = await late.wait()
        assert (result.exit_code, result.stderr) == (6, b"err\n"), result
        assert [(info.tag, info.running) for info in await box.processes()] == [("t", False)]
        for tag, wanted in (("t", ValueError), ("other", KeyError)):
            try:
                await (box.spawn("true", tag=tag) if wanted is ValueError else box.process(tag))
            except wanted:
                continue
            raise AssertionError(f"tag {tag!r} raised nothing")


async def a_process_takes_signals(bench: Bench) -> None:
    """A signal reaches the process; one to a process that has ended is nothing."""
    async with bench.box() as box:
        process = await box.spawn("trap 'echo got; exit 9' TERM; echo up; while :; do sleep 0.05; done")
        assert await process.readline() == b"up\n"
        await process.signal(signal.SIGTERM)
        assert await process.readline() == b"got\n"
        assert (await process.wait()).exit_code == 9
        await process.signal(signal.SIGTERM)


CHECKS = [
    *(Check(function, needs=("log",)) for function in (
        a_key_runs_once, at_once_a_key_runs_once, a_key_names_one_command, keyed_results_are_whole,
        keys_are_the_sandboxs_own, the_log_is_ordered_and_complete,
    )),
    *(Check(function, needs=("pty",)) for function in (a_terminal_when_asked, a_terminal_interrupts)),
    *(Check(function, needs=("tags",)) for function in (a_tag_is_attached_again, an_ended_tag_still_answers)),
    Check(a_process_takes_signals),
]  # fmt: skip
