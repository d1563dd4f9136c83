"""A session with the helper in one pod: requests with descriptors over exec streams that may be cut.

Everything above sees local pipes and sockets only. When a connection breaks, the link opens another one and
both sides repeat what the other lacks (`sandbox.node.frames`): a command notices nothing, runs once, and its
output is complete. After `reconnect_s` without a connection, or when the pod is gone, the link is lost and
its descriptors end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sandbox.base import SandboxError, SandboxLost, SandboxUnavailable
from sandbox.kubernetes.execstream import STDOUT, ExecStream
from sandbox.node import frames, mux
from sandbox.node.frames import Kind

HELLO_SECONDS = 15.0
PING_SECONDS = 10.0
SILENCE_SECONDS = 35.0
FILE_BLOCK = 256 << 10
FIRST_WAIT = 0.05
LONGEST_WAIT = 2.0


class LoopReactor:
    """`mux.Reactor` over the running asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wanted: dict[int, tuple[bool, bool]] = {}
        self.mux: mux.Mux

    def interest(self, fd: int, *, read: bool, write: bool) -> None:
        was_read, was_write = self._wanted.get(fd, (False, False))
        if read and not was_read:
            self._loop.add_reader(fd, self.mux.readable, fd)
        elif was_read and not read:
            self._loop.remove_reader(fd)
        if write and not was_write:
            self._loop.add_writer(fd, self.mux.writable, fd)
        elif was_write and not write:
            self._loop.remove_writer(fd)
        if read or write:
            self._wanted[fd] = (read, write)
        else:
            self._wanted.pop(fd, None)


class Link:
    """One client's session; `dial` opens a new exec stream to the pod's helper."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[ExecStream]],
        name: str,
        reconnect_s: float,
        record: Callable[[bytes], None],
        *,
        creator: bool,
    ) -> None:
        """`record` stores lines of the sandbox's log for good; the pod ends with its `creator`'s session."""
        self._dial = dial
        self._name = name
        self._reconnect_s = reconnect_s
        self._record = record
        self._creator = creator
        self._session = secrets.token_hex(8)
        self._token = secrets.token_hex(16)
        self._ledger = frames.Ledger()
        self._reactor = LoopReactor()
        self._mux = self._reactor.mux = mux.Mux(self._ledger, self._reactor, self._emit)
        self._outbox = bytearray()
        self._work = asyncio.Event()
        self._connected = False
        self._waiters: list[asyncio.Future[None]] = []
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self.lost: SandboxError | None = None
        """Why the session is over; None while it is not."""
        self.accept: Callable[[socket.socket, int], None] | None = None
        """Takes connections that the helper accepted in the pod: (socket, port). None: they are closed."""
        self.connections = 0
        """How many exec streams were opened, the first included."""

    async def start(self) -> dict[str, Any]:
        """Connect; the helper's facts about its pod. Raises SandboxLost or SandboxUnavailable."""
        self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._ready)

    async def request(self, message: dict[str, Any], fds: Sequence[int]) -> int:
        """Send a request with descriptors, which are duplicated: the caller still closes its own. Returns the
        number by which `heard` tells whether it arrived."""
        if not self._connected and self.lost is None:
            await self._settled()
        if self.lost is not None:
            raise self.lost
        kinds = [mux.kind_of(fd) for fd in fds]
        ids = self._mux.reserve(len(fds))
        for id, fd, kind in zip(ids, fds, kinds, strict=True):
            if kind == "file":
                self._send_file(id, fd)
        body = json.dumps({**message, "streams": list(zip(ids, kinds, strict=True))}).encode()
        self._mux.send(Kind.REQUEST, 0, body)
        number = self._ledger.sent
        for id, fd, kind in zip(ids, fds, kinds, strict=True):
            if kind in ("read", "write", "both"):
                self._mux.add(id, os.dup(fd), kind)
        return number

    def heard(self, number: int) -> bool:
        """Whether the pod is known to have received the request of that number."""
        return number <= self._ledger.heard

    async def _settled(self) -> None:
        """Wait until there is a connection again, or none will be."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _send_file(self, id: int, fd: int) -> None:
        at = 0
        while block := os.pread(fd, FILE_BLOCK, at):
            self._mux.send(Kind.FILE, id, block)
            at += len(block)

    def _accept(self, stream: int, port: int) -> None:
        """A program in the pod has connected to `port`."""
        ours, theirs = socket.socketpair()
        self._mux.add(stream, theirs.detach(), "both")
        if self.accept is None:
            ours.close()
        else:
            ours.setblocking(False)
            self.accept(ours, port)

    def fail(self, reason: SandboxError) -> None:
        """The pod is known to be gone: everything ends now."""
        if self.lost is None:
            self.lost = reason
            self._mux.close()
            self._wake()
            if not self._ready.done():
                self._ready.set_exception(reason)
                self._ready.exception()  # nobody may be waiting
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def close(self, *, bye: bool = True) -> None:
        """End the session; with `bye` the pod ends its commands at once instead of waiting for us."""
        if bye and self._connected and self.lost is None:
            self._mux.send(Kind.BYE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while self._outbox and self._connected:
                        await asyncio.sleep(0)
        self.fail(SandboxLost(f"sandbox {self._name} is closed"))
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # ---- connections

    def _emit(self, data: bytes) -> None:
        if self._connected:  # else the ledger repeats it on the next connection
            self._outbox += data
            self._work.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        wait, away_since, problem = FIRST_WAIT, loop.time(), ""
        while self.lost is None:
            before = self._ledger.received
            try:
                await self._connection()
            except (SandboxLost, SandboxUnavailable) as error:
                problem = str(error)
                if isinstance(error, SandboxLost):
                    self.fail(error)
                    return
            except (OSError, frames.LinkBroken, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            finally:
                self._connected = False
                self._outbox.clear()
            if self._ledger.received > before:
                wait, away_since = FIRST_WAIT, loop.time()
            if loop.time() - away_since > self._reconnect_s:
                what = f"no connection to sandbox {self._name} for {self._reconnect_s:g} s: {problem}"
                self.fail(SandboxLost(what))
                return
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)

    async def _connection(self) -> None:
        """One exec stream from its hello to its end."""
        async with asyncio.timeout(HELLO_SECONDS):
            stream = await self._dial()
        self.connections += 1
        writer: asyncio.Task[None] | None = None
        parser = frames.Parser()
        try:
            hello = {"session": self._session, "token": self._token, "received": self._ledger.received,
                     "creator": self._creator}  # fmt: skip
            await stream.write(frames.Ledger().encode(Kind.HELLO, 0, json.dumps(hello).encode()))
            pieces = aiter(stream)
            errors = b""
            while True:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS if writer else HELLO_SECONDS):
                        channel, data = await anext(pieces)
                except StopAsyncIteration:
                    break
                if channel != STDOUT:
                    errors = (errors + data)[-2000:]
                    continue
                for frame in parser.feed(data):
                    if frame.kind is Kind.WELCOME:
                        self._welcome(frame.json())
                        writer = asyncio.create_task(self._write(stream))
                    elif writer is not None and self._ledger.accept(frame):
                        if frame.kind is Kind.LOG:
                            self._record(frame.payload)
                        elif frame.kind is Kind.OPEN:
                            self._accept(frame.stream, int(frame.payload))
                        else:
                            self._mux.frame(frame)
                if self._ledger.owes():
                    self._emit(self._ledger.encode(Kind.ACK))
            status = stream.status
            said = errors.decode(errors="replace").strip() or (status.message if status else "")
            raise ConnectionError(f"the helper's connector ended ({status.code if status else '?'}): {said}")
        finally:
            if writer is not None:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await writer
            await stream.close()

    def _welcome(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise SandboxLost(f"sandbox {self._name} has ended this session: we were away for too long")
        self._outbox[:] = self._ledger.replay(int(answer["received"]))
        self._connected = True
        self._work.set()
        self._wake()
        if not self._ready.done():
            self._ready.set_result(answer["facts"])

    async def _write(self, stream: ExecStream) -> None:
        while True:
            self._work.clear()
            if not self._outbox:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PING_SECONDS):
                        await self._work.wait()
                if not self._outbox:
                    self._outbox += self._ledger.encode(Kind.PING)
            data = bytes(self._outbox)
            self._outbox.clear()
            await stream.write(data)
