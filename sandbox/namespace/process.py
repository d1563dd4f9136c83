"""A command in a namespace sandbox: its pipes, its end, its typed outcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from sandbox.base import Chunk, ExecResult, Outcome, Size
from sandbox.namespace.channel import Channel, Collector, writable

if TYPE_CHECKING:
    from sandbox.namespace.handle import NamespaceSandbox

DRAIN_SECONDS = 0.1
"""Silence after which output counts as complete although a background process holds the pipe."""
DRAIN_MAX_SECONDS = 2.0
GRACE_SECONDS = 15.0
"""How long after a command's timeout the sandbox itself is given up."""


class NamespaceProcess:
    """A command under way; see `sandbox.base.Process`."""

    def __init__(
        self,
        sandbox: NamespaceSandbox,
        status: Channel,
        pipes: tuple[int, int, int],
        timeout: float | None,
        max_output: int,
        stream: bool,
        *,
        may_kill_monitor: bool,
    ) -> None:
        self.tag: str | None = None
        self._sandbox = sandbox
        self._status = status
        self._stdin, self._stdout_fd, stderr = pipes
        self._timeout = timeout
        self._may_kill_monitor = may_kill_monitor
        self._started = time.monotonic()
        self._out = None if stream else Collector(self._stdout_fd, max_output)
        self._err = Collector(stderr, max_output)
        self._reader = asyncio.StreamReader(limit=64 << 20) if stream else None
        self._transport: asyncio.ReadTransport | None = None
        self._writing = asyncio.Lock()
        self._result: ExecResult | None = None
        self._waiting = asyncio.Lock()

    async def open_streams(self) -> None:
        assert self._reader is not None
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        pipe = os.fdopen(self._stdout_fd, "rb", 0)
        self._transport, _ = await loop.connect_read_pipe(lambda: protocol, pipe)

    def take_stdin(self) -> int:
        fd, self._stdin = self._stdin, -1
        return fd

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError once the process no longer reads."""
        async with self._writing:
            if self._stdin < 0:
                raise BrokenPipeError("standard input is closed")
            copy = os.dup(self._stdin)  # close_stdin may come meanwhile
            os.set_blocking(copy, False)
            view = memoryview(data)
            try:
                while view:
                    try:
                        view = view[os.write(copy, view) :]
                    except BlockingIOError:
                        await writable(copy)
            finally:
                os.close(copy)

    async def close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self.take_stdin())

    async def readline(self) -> bytes:
        """Next line of standard output, b'' at the end."""
        assert self._reader is not None, "only spawned processes have line streams"
        return await self._reader.readline()

    async def read_exactly(self, size: int) -> bytes:
        """Exactly `size` bytes of standard output; raises asyncio.IncompleteReadError at its end."""
        assert self._reader is not None, "only spawned processes have line streams"
        return await self._reader.readexactly(size)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Standard output as it comes; standard error is kept for `wait`."""
        assert self._reader is not None, "only spawned processes have streams"
        while data := await self._reader.read(1 << 16):
            yield Chunk("stdout", data)

    async def signal(self, number: int) -> None:
        """Send a signal to the process and its group; nothing happens if it has ended."""
        with contextlib.suppress(OSError):
            await self._status.send({"signal": number})

    async def resize(self, size: Size) -> None:
        """Raises ValueError: there is no terminal."""
        raise ValueError(
            f"the process has no terminal to resize to {size.columns}x{size.rows}; spawn with pty="
        )

    async def detach(self) -> None:
        """Raises ValueError without a tag."""
        raise ValueError("only a tagged process outlives its client; spawn it with tag=")

    async def kill(self) -> None:
        """Kill the process and everything it started; `wait` then reports `cancelled`."""
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._status.sock.shutdown(socket.SHUT_WR)

    async def wait(self) -> ExecResult:
        """The result; cancelling this call kills the process."""
        async with self._waiting:
            if self._result is None:
                try:
                    self._result = await self._wait()
                finally:
                    self.release()
            return self._result

    async def _wait(self) -> ExecResult:
        limit = None if self._timeout is None else self._timeout + GRACE_SECONDS
        try:
            async with asyncio.timeout(limit):
                report = await self._status.receive()
        except TimeoutError:
            await self._sandbox.abandon()
            report = None
        duration = time.monotonic() - self._started
        await self._drain()
        if report is None and self._sandbox.connected:
            # Its monitor was killed: by the kernel for memory, or by a command of the monitor's user.
            fate = Outcome.SIGNALED if self._may_kill_monitor else Outcome.OOM
            outcome, code, number = fate, None, signal.SIGKILL
        else:
            outcome, code, number = _outcome(report)
        return ExecResult(
            outcome=outcome,
            exit_code=code,
            signal=number,
            stdout=self._out.take() if self._out else b"",
            stderr=self._err.take(),
            stdout_total=self._out.total if self._out else 0,
            stderr_total=self._err.total,
            duration_s=duration,
            peak_memory=report.get("maxrss") if report else None,
        )

    async def _drain(self) -> None:
        """Wait for the pipes' ends, or for silence if a background process holds them."""
        loop = asyncio.get_running_loop()
        ends = [each for each in (self._out, self._err) if each is not None]
        began = loop.time()
        while waiting := [each.ended for each in ends if not each.ended.done()]:
            now = loop.time()
            quiet = now - max(began, *(each.last_data for each in ends))
            if quiet >= DRAIN_SECONDS or now - began >= DRAIN_MAX_SECONDS:
                return
            await asyncio.wait(waiting, timeout=DRAIN_SECONDS - quiet)

    def abandon(self) -> None:
        """The sandbox is gone: release what nobody waits for; a waiter sees the end by itself."""
        if not self._waiting.locked():
            self.release()

    def release(self) -> None:
        """Give up everything but the draining of pipes that background processes still hold; idempotent."""
        self._sandbox.forget(self)
        self._hang_up()
        self._status.close()
        if self._stdin >= 0:
            os.close(self.take_stdin())
        if self._transport is not None:
            self._transport.close()
        for collector in (self._out, self._err):
            if collector is not None and not collector.ended.done():
                collector.discard()
                self._sandbox.keep_draining(collector)


def _outcome(report: dict[str, Any] | None) -> tuple[Outcome, int | None, int | None]:
    """(outcome, exit code, signal) from the monitor's report and the limits that were hit meanwhile."""
    if report is None:
        return Outcome.LOST, None, None
    if "error" in report:
        return Outcome.PIDS, None, None
    code, number = report["exit"], report["signal"]
    if report["reason"] == "timeout":
        return Outcome.TIMEOUT, None, number
    if report["reason"] == "killed":
        return Outcome.CANCELLED, None, number
    if code == 0:
        return Outcome.EXITED, 0, None
    if "oom" in report["hit"]:
        return Outcome.OOM, code, number
    if "pids" in report["hit"]:
        return Outcome.PIDS, code, number
    if report["disk_full"]:
        return Outcome.DISK, code, number
    return (Outcome.SIGNALED if number is not None else Outcome.EXITED), code, number
