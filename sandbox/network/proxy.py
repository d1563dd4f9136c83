"""The only way out of a sandbox: an HTTP proxy of ours that listens inside its network namespace.

The namespace has loopback and nothing else: no route, no resolver. The sandbox's init makes a listening
socket in there and hands it to this process, which accepts on it, decides by name, resolves the name itself,
refuses every address that is not public, and connects to exactly the address that it has checked, so that a
name which changes its address in between (DNS rebinding) gains nothing. A name that is not allowed is never
resolved: it cannot carry data out. Tunnels to port 443 must open with a TLS hello for the same name.

What it does not do: look into TLS (a server behind a shared front may still serve another site for another
Host), limit bytes, or speak anything but HTTP/1.1 and CONNECT.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from sandbox.base import NetworkPolicy
from sandbox.network import hello, requests
from sandbox.network.addresses import AllowList, hostname, refusal
from sandbox.network.index import PackageIndex
from sandbox.network.requests import BadRequest, Request

HEAD_S = 15.0
CONNECT_S = 20.0
IDLE_S = 300.0
CONNECTIONS = 128
_BLOCK = 1 << 16

Resolve = Callable[[str, int], Awaitable[list[str]]]
Dial = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One thing that the sandbox wanted to reach."""

    at: float
    """Seconds since the epoch."""
    target: str
    reason: str | None
    """Why it was refused; None: it was not."""


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def addresses_of(name: str, port: int) -> list[str]:
    """The host's answer: every address of a name."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def connect(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an address."""
    return await asyncio.open_connection(address, port)


class Proxy:
    """Serves one sandbox under one policy, which may change."""

    def __init__(
        self,
        policy: NetworkPolicy,
        *,
        index: PackageIndex | None = None,
        trusted: Sequence[str] = (),
        resolve: Resolve | None = None,
        dial: Dial | None = None,
    ) -> None:
        """`trusted`: private networks (CIDR) whose addresses allowed names may have, such as a company's
        mirror. `resolve` and `dial` stand in for the host's. ValueError for a malformed policy or network."""
        self._trusted = tuple(ipaddress.ip_network(net) for net in trusted)
        self._resolve = resolve or addresses_of
        self._dial = dial or connect
        self._servers: list[asyncio.Server] = []
        self._ports: set[int] = set()
        self._tasks: dict[asyncio.Task[None], tuple[str, int] | None] = {}
        self._index = index
        self.attempts: deque[Attempt] = deque(maxlen=1000)
        """The last ones, oldest first."""
        self.allow = AllowList(policy.allow if policy.mode == "allow" else ())

    async def listen(self, sock: socket.socket) -> None:
        """Serve on a listening socket, of whatever namespace; closes it in the end."""
        server = await asyncio.start_server(self._accept, sock=sock, limit=requests.MAX_HEAD)
        self._servers.append(server)
        self._ports.add(sock.getsockname()[1])

    async def take(self, sock: socket.socket, port: int) -> None:
        """Serve one connection that was accepted elsewhere, at that port; until it ends."""
        self._ports.add(port)
        reader, writer = await asyncio.open_connection(sock=sock, limit=requests.MAX_HEAD)
        await self._accept(reader, writer)

    def change(self, policy: NetworkPolicy, index: PackageIndex | None = None) -> None:
        """Another policy from now on; connections that it does not allow are cut."""
        self.allow = AllowList(policy.allow if policy.mode == "allow" else ())
        self._index = index
        for task, target in self._tasks.items():
            if target is None or target not in self.allow:
                task.cancel()

    async def close(self) -> None:
        """Cut every connection and stop."""
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._servers.clear()

    # ---- one connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= CONNECTIONS:
            writer.close()
            return
        self._tasks[task] = None
        try:
            await self._serve(reader, writer, task)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # either side broke off
        except asyncio.CancelledError:
            pass  # by `change` or `close`: this task serves one connection and ends here
        finally:
            self._tasks.pop(task, None)
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                request = await requests.read(reader)
            if request is None:
                return
            if self._is_ours(request):
                await self._answer_index(request, writer)
            elif request.method == "CONNECT":
                await self._tunnel(request, reader, writer, task)
            else:
                await self._forward(request, reader, writer, task)
        except BadRequest as error:
            await _say(writer, HTTPStatus.BAD_REQUEST, str(error))
        except _Refused as error:
            await _say(writer, error.status, str(error))

    def _is_ours(self, request: Request) -> bool:
        return request.method != "CONNECT" and (
            request.host is None
            or (request.host in ("127.0.0.1", "localhost") and request.port in self._ports)
        )

    async def _reach(
        self, request: Request, task: asyncio.Task[None]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to where the request wants to go, if it may."""
        said = f"{request.host}:{request.port}"[:300]
        name = hostname(request.host or "")
        port = request.port or 0
        if name is None or (name, port) not in self.allow:
            raise self._refuse(said, f"this sandbox may not reach {said}")
        self._tasks[task] = (name, port)
        try:
            async with asyncio.timeout(CONNECT_S):
                addresses = await self._resolve(name, port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise self._refuse(said, f"{name} has no address: {error}", HTTPStatus.BAD_GATEWAY) from None
        reasons = [refusal(address, self._trusted) for address in addresses]
        if bad := next((reason for reason in reasons if reason), None):
            raise self._refuse(said, f"this sandbox may not reach {name}: {bad}")
        for address in addresses:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    pair = await self._dial(address, port)
                self.attempts.append(Attempt(time.time(), said, None))
                return pair
        raise self._refuse(said, f"{said} does not answer", HTTPStatus.BAD_GATEWAY)

    def _refuse(self, target: str, reason: str, status: HTTPStatus = HTTPStatus.FORBIDDEN) -> _Refused:
        self.attempts.append(Attempt(time.time(), target, reason))
        return _Refused(status, reason)

    async def _tunnel(
        self,
        request: Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[None],
    ) -> None:
        far_reader, far_writer = await self._reach(request, task)
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if request.port == 443:
                far_writer.write(await self._hello(request, reader))
            await _relay((reader, far_writer), (far_reader, writer))
        finally:
            far_writer.close()

    async def _hello(self, request: Request, reader: asyncio.StreamReader) -> bytes:
        """The first TLS record, if it asks for the name that the tunnel was opened for."""
        target = f"{request.host}:{request.port}"
        try:
            async with asyncio.timeout(HEAD_S):
                record, name = await hello.read(reader)
        except (hello.NoHello, TimeoutError):
            raise ConnectionAbortedError(str(self._refuse(target, "the tunnel carries no TLS"))) from None
        if name is None or hostname(name) != hostname(request.host or ""):
            raise ConnectionAbortedError(str(self._refuse(target, f"the tunnel asks for {name}"[:300])))
        return record

    async def _forward(
        self,
        request: Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[None],
    ) -> None:
        """One request with its body, one answer; nothing that follows in the same connection."""
        far_reader, far_writer = await self._reach(request, task)
        try:
            far_writer.write(request.forward())

            async def send() -> None:
                left = request.length
                while left:
                    data = await reader.read(min(left, _BLOCK))
                    if not data:
                        raise ConnectionResetError
                    left -= len(data)
                    far_writer.write(data)
                    await far_writer.drain()

            sending = asyncio.create_task(send())
            try:
                await _copy(far_reader, writer)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        finally:
            far_writer.close()

    async def _answer_index(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if self._index is None:
            raise self._refuse(request.path[:300], "this sandbox has no package index", HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "a package index is only read")
        origin = f"http://127.0.0.1:{writer.get_extra_info('sockname')[1]}"
        reply = await self._index.get(request.path, request.header("accept"), origin)
        body = reply.body
        said = None if reply.status == HTTPStatus.OK or isinstance(body, Path) else body.decode().strip()
        self.attempts.append(Attempt(time.time(), request.path[:300], said))
        length = body.stat().st_size if isinstance(body, Path) else len(body)
        writer.write(_head(HTTPStatus(reply.status), reply.media_type, length))
        if request.method == "HEAD":
            return
        if isinstance(body, Path):
            with body.open("rb") as file:
                while block := file.read(_BLOCK):
                    writer.write(block)
                    await writer.drain()
        else:
            writer.write(body)
        await writer.drain()


def _head(status: HTTPStatus, media_type: str, length: int) -> bytes:
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {media_type}\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


async def _say(writer: asyncio.StreamWriter, status: HTTPStatus, sentence: str) -> None:
    body = f"{sentence}\n".encode(errors="replace")
    writer.write(_head(status, "text/plain; charset=utf-8", len(body)) + body)
    await writer.drain()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while True:
        async with asyncio.timeout(IDLE_S):
            data = await source.read(_BLOCK)
        if not data:
            return
        target.write(data)
        await target.drain()


async def _relay(*pairs: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copy each way until both have ended; one side may end first (half-closed connections)."""

    async def one_way(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        await _copy(source, target)
        if target.can_write_eof():
            target.write_eof()

    tasks = [asyncio.create_task(one_way(source, target)) for source, target in pairs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
