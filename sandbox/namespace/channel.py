"""Frames and pipes on the running asyncio loop, without threads."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from sandbox.base import Data
from sandbox.node import wire
from sandbox.node.kept import Kept


async def writable(fd: int) -> None:
    """Wait until `fd` takes data."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(fd, wake)
    try:
        await ready
    finally:
        loop.remove_writer(fd)


async def readable(fd: int) -> None:
    """Wait until `fd` has something to read."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


class Channel:
    """One end of a stream of frames. Sends are serialised; one task at a time may receive."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._buffer = bytearray()
        self._sending = asyncio.Lock()

    async def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one frame; the descriptors are duplicated, so the caller still closes its own."""
        view = memoryview(wire.encode(message))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        async with self._sending:
            while view:
                try:
                    sent = self.sock.sendmsg([view], ancillary)
                except BlockingIOError:
                    await writable(self.sock.fileno())
                    continue
                ancillary = []
                view = view[sent:]

    async def receive(self) -> dict[str, Any] | None:
        """The next frame, or None at the end of the stream."""
        loop = asyncio.get_running_loop()
        while True:
            message = self.pop()
            if message is not None:
                return message
            try:
                data = await loop.sock_recv(self.sock, 1 << 16)
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data

    def feed(self) -> bool:
        """Read what is there without waiting; False at the end of the stream."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._buffer += data
        return bool(data)

    def pop(self) -> dict[str, Any] | None:
        """A complete buffered frame, if there is one."""
        if len(self._buffer) < wire.HEADER.size:
            return None
        (length,) = wire.HEADER.unpack_from(self._buffer)
        end = wire.HEADER.size + length
        if len(self._buffer) < end:
            return None
        message = json.loads(self._buffer[wire.HEADER.size : end])
        del self._buffer[:end]
        return message

    def close(self) -> None:
        self.sock.close()


class Collector:
    """Drains one pipe as fast as it fills, keeping the first and last halves of `limit` bytes.

    `follow` also gives everything to a reader; the pipe then waits while he is far behind. With `early`, what
    comes before he begins is kept for him, up to FAR_BEHIND bytes: beyond, nobody seems to want it.
    """

    FAR_BEHIND = 1 << 20

    def __init__(self, fd: int, limit: int, *, early: bool = False) -> None:
        self.last_data = 0.0
        self.ended: asyncio.Future[None]
        self._fd = fd
        self._kept = Kept(limit)
        self._followed: deque[bytes] | None = deque() if early else None
        self._following = False
        self._behind = 0
        self._fresh = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    @property
    def total(self) -> int:
        """Bytes so far."""
        return self._kept.total

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.last_data = self._loop.time()
        self._kept.add(data)
        if self._followed is not None:
            self._followed.append(data)
            self._behind += len(data)
            self._fresh.set()
            if self._behind > self.FAR_BEHIND and self._following:
                self._loop.remove_reader(self._fd)
            elif self._behind > self.FAR_BEHIND:
                self._followed, self._behind = None, 0

    async def follow(self) -> AsyncIterator[bytes]:
        """Everything kept so far, then everything that comes, to its end."""
        self._following = True
        if self._followed is None:
            self._followed = deque([self.take()])
        while True:
            while self._followed:
                data = self._followed.popleft()
                if self._behind > self.FAR_BEHIND >= self._behind - len(data) and self._fd >= 0:
                    self._loop.add_reader(self._fd, self._read)
                self._behind = max(0, self._behind - len(data))
                if data:
                    yield data
            if self.ended.done():
                return
            self._fresh.clear()
            await self._fresh.wait()

    def take(self) -> bytes:
        """What was kept: everything, or head and tail around a cut."""
        return self._kept.take()

    def discard(self) -> None:
        """Go on draining without keeping anything: a background process may still write."""
        self._kept.discard()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if not self.ended.done():
            self.ended.set_result(None)
        self._fresh.set()


class Counted:
    """Data that counts what was taken of it."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self.total = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for block in blocks(self._data):
            self.total += len(block)
            yield block


async def blocks(data: Data) -> AsyncIterator[bytes]:
    """The same for bytes at once and bytes that come."""
    if isinstance(data, bytes | bytearray | memoryview):
        yield bytes(data)
        return
    async for block in data:
        yield block


async def feed(fd: int, data: Data) -> None:
    """Write all of `data` into a pipe and close it; a reader that went away is no error."""
    os.set_blocking(fd, False)
    try:
        async for block in blocks(data):
            view = memoryview(block)
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await writable(fd)
    except BrokenPipeError:
        pass
    finally:
        os.close(fd)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
