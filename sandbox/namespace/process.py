"""A command in a namespace sandbox: its pipes, its end, its typed outcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from sandbox.base import Chunk, ExecResult, Outcome, Repercussion, SandboxError, SandboxLost, Size
from sandbox.namespace.channel import Channel, Collector, writable
from sandbox.node import verdicts

if TYPE_CHECKING:
    from sandbox.namespace.connection import Connection

DRAIN_SECONDS = 0.1
"""Silence after which output counts as complete although a background process holds the pipe."""
DRAIN_MAX_SECONDS = 2.0
GRACE_SECONDS = 15.0
"""How long after a command's timeout the sandbox itself is given up."""


class LineReader(asyncio.StreamReader):
    """A StreamReader that knows when data came last and when it ended."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit=limit)
        self.last_data = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.last_data = asyncio.get_running_loop().time()
        super().feed_data(data)

    def feed_eof(self) -> None:
        super().feed_eof()
        if not self.ended.done():
            self.ended.set_result(None)


class NamespaceProcess:
    """A command under way; see `sandbox.base.Process`."""

    def __init__(
        self,
        sandbox: Connection,
        status: Channel,
        pipes: tuple[int, int, int],
        timeout: float | None,
        max_output: int,
        stream: bool,
        *,
        may_kill_monitor: bool,
    ) -> None:
        self.tag: str | None = None
        self.on_end: Callable[[ExecResult], None] | None = None
        self._sandbox = sandbox
        self._status = status
        self._stdin, self._stdout_fd, stderr = pipes
        self._timeout = timeout
        self._may_kill_monitor = may_kill_monitor
        self._started = time.monotonic()
        self._out = None if stream else Collector(self._stdout_fd, max_output)
        self._err = Collector(stderr, max_output, early=stream)
        self._reader = LineReader(limit=64 << 20) if stream else None
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
        """Both streams until their ends, nothing lost however slow the reader."""
        assert self._reader is not None, "only spawned processes have streams"
        queue: asyncio.Queue[Chunk | None] = asyncio.Queue(maxsize=16)
        pumps = [
            asyncio.create_task(_pump("stdout", _blocks(self._reader), queue)),
            asyncio.create_task(_pump("stderr", self._err.follow(), queue)),
        ]
        try:
            ends = 0
            while ends < len(pumps):
                chunk = await queue.get()
                if chunk is None:
                    ends += 1
                else:
                    yield chunk
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def signal(self, number: int) -> None:
        """Send a signal to the process and its group; nothing happens if it has ended."""
        await self._tell({"signal": number})

    async def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            await self._status.send(message)

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
                    if self.on_end is not None:
                        self.on_end(self._result)
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
        if report is not None and "detached" in report:
            raise SandboxError(f"another client attached to the process of tag {self.tag!r}")
        outcome, code, number = await self._judge(report)
        fate = report.get("repercussion") if report is not None else None
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
            repercussion=Repercussion(fate) if fate else await self._fate(outcome),
        )

    async def _judge(self, report: dict[str, Any] | None) -> tuple[Outcome, int | None, int | None]:
        """(outcome, exit code, signal)."""
        if report is not None:
            outcome, code, number = verdicts.classify(report)
            return Outcome(outcome), code, number
        if not self._sandbox.connected:
            return Outcome.LOST, None, None
        # Its monitor was killed: by the kernel for memory, or by a command of the monitor's user.
        return (Outcome.SIGNALED if self._may_kill_monitor else Outcome.OOM), None, signal.SIGKILL

    async def _fate(self, outcome: Outcome) -> Repercussion | None:
        return await self._sandbox.fate() if outcome is Outcome.LOST else None

    async def _drain(self) -> None:
        """Wait for the pipes' ends, or for silence if a background process holds them."""
        loop = asyncio.get_running_loop()
        ends = [each for each in (self._out or self._reader, self._err) if each is not None]
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


class HeldProcess(NamespaceProcess):
    """A process whose monitor holds its streams: with a pseudo-terminal, or a tag."""

    def __init__(self, *arguments: Any, tag: str | None, pty: bool, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.tag = tag
        self._pty = pty

    async def begin(self) -> None:
        """Wait until the monitor serves us. ValueError if the tag is taken, KeyError if there is none."""
        reply = await self._status.receive()
        if reply is not None and "attached" in reply:
            await self.open_streams()
            return
        self._reader = None
        self.release()
        os.close(self._stdout_fd)
        if reply is None:
            raise await self._sandbox.lost("it died while a process was being started")
        if "taken" in reply:
            raise ValueError(
                f"tag {self.tag!r} was given to another process of this sandbox; choose a new one"
            )
        if "gone" in reply:
            raise KeyError(f"no process of this sandbox has the tag {self.tag!r}")
        raise SandboxLost(
            f"what commands left running fills the process limit: {reply['error']}", Repercussion.PROCESSES
        )

    async def close_stdin(self) -> None:
        if self._stdin >= 0:
            await self._tell({"eof": True})
            os.close(self.take_stdin())

    async def kill(self) -> None:
        """Kill the process and everything it started; `wait` then reports `cancelled`."""
        await self._tell({"kill": True})

    async def resize(self, size: Size) -> None:
        """Set the terminal's size. ValueError without one."""
        if not self._pty:
            await super().resize(size)
        await self._tell({"resize": [size.rows, size.columns]})

    async def detach(self) -> None:
        """Let go of a tagged process without ending it. ValueError without a tag."""
        if self.tag is None:
            await super().detach()
        self.release()


async def _blocks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(1 << 16):
        yield data


async def _pump(
    stream: Literal["stdout", "stderr"], source: AsyncIterator[bytes], queue: asyncio.Queue[Chunk | None]
) -> None:
    async for data in source:
        await queue.put(Chunk(stream, data))
    await queue.put(None)
