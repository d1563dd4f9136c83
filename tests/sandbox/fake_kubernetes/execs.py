"""Exec streams: a command of a pod's sandbox on a websocket, v4 or v5.channel.k8s.io."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import WSMsgType, web

from sandbox.namespace import NamespaceSandbox
from sandbox.namespace.channel import Channel, close_all, writable
from tests.sandbox.fake_kubernetes.faults import Faults

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255


class Cut(Exception):
    """A fault: the connection ends here."""


class Exec:
    """One command and its websocket. When the client goes away, the command goes on, as on a real node."""

    def __init__(
        self,
        box: NamespaceSandbox,
        request: web.Request,
        faults: Faults,
        user: str,
        linger: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.box, self.request, self.faults, self.user, self.linger = box, request, faults, user, linger
        self.socket = web.WebSocketResponse(protocols=PROTOCOLS[1:] if faults.only_v4 else PROTOCOLS)
        self.out_left = faults.cut_output.pop(0) if faults.cut_output else None
        self.in_left = faults.cut_input.pop(0) if faults.cut_input else None
        self.lose_at = faults.lose_output.pop(0) if faults.lose_output else None
        self.sent = 0

    async def serve(self) -> web.WebSocketResponse:
        query = self.request.query
        await self.socket.prepare(self.request)
        ours, theirs = socket.socketpair()
        pipes = [os.pipe() for _ in range(3)]
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = pipes
        message = {
            "op": "exec", "argv": query.getall("command"), "cwd": "/", "user": self.user, "timeout": None,
            "env": {"PATH": os.environ["PATH"], "HOSTNAME": "sandbox"},
        }  # fmt: skip
        if query.get("stdin") not in ("true", "1"):
            os.close(in_w)
            in_w = -1
        try:
            await self.box.send(message, [theirs.fileno(), in_r, out_w, err_w])
        except BaseException:
            close_all([out_r, err_r, *([in_w] if in_w >= 0 else [])])
            ours.close()
            raise
        finally:
            theirs.close()
            close_all([in_r, out_w, err_w])
        status = Channel(ours)
        reader = asyncio.create_task(self._input(in_w))
        outputs = [
            asyncio.create_task(self._output(out_r, STDOUT)),
            asyncio.create_task(self._output(err_r, STDERR)),
        ]
        try:
            report = await self._report(status, outputs, reader)
            await self._finish(report)
        except (Cut, ConnectionError, asyncio.CancelledError):
            if self.request.transport is not None:
                self.request.transport.abort()
        finally:
            for task in (reader, *outputs):
                task.cancel()
            await asyncio.gather(reader, *outputs, return_exceptions=True)
            self.linger(_linger(status)).add_done_callback(lambda _: status.close())
        return self.socket

    async def _report(
        self, status: Channel, outputs: list[asyncio.Task[None]], reader: asyncio.Task[None]
    ) -> dict[str, Any] | None:
        """The command's end; raises Cut when the connection ends first."""
        ended = asyncio.create_task(status.receive())
        pending: set[asyncio.Task[Any]] = {ended, reader, *outputs}
        try:
            while not ended.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ended}:
                    task.result()
        finally:
            if not ended.done():
                ended.cancel()
        await asyncio.wait(outputs, timeout=2.0)
        for task in outputs:
            if task.done():
                task.result()
        return ended.result()

    async def _input(self, fd: int) -> None:
        """Channel 0 to the command; Cut at the end of the connection."""
        try:
            async for message in self.socket:
                if message.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                    break
                data = message.data.encode() if isinstance(message.data, str) else message.data
                if self.in_left is not None:
                    self.in_left -= len(data)
                    if self.in_left < 0:
                        raise Cut
                if data[:2] == bytes([CLOSE, STDIN]) and self.socket.ws_protocol == PROTOCOLS[0]:
                    if fd >= 0:
                        os.close(fd)
                        fd = -1
                elif data[:1] == bytes([STDIN]) and fd >= 0:
                    view = memoryview(data)[1:]
                    os.set_blocking(fd, False)
                    try:
                        while view:
                            try:
                                view = view[os.write(fd, view) :]
                            except BlockingIOError:
                                await writable(fd)
                    except BrokenPipeError:
                        os.close(fd)
                        fd = -1
            raise Cut
        finally:
            if fd >= 0:
                os.close(fd)

    async def _output(self, fd: int, channel: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
        )
        size = self.faults.frame_bytes or 32 << 10
        try:
            while data := await reader.read(32 << 10):
                for start in range(0, len(data), size):
                    await self._send(channel, data[start : start + size])
        finally:
            transport.close()

    async def _send(self, channel: int, data: bytes) -> None:
        if self.lose_at is not None and self.sent <= self.lose_at < self.sent + len(data):
            self.sent += len(data)
            return
        self.sent += len(data)
        if self.out_left is not None:
            self.out_left -= len(data)
            if self.out_left < 0:
                await self.socket.send_bytes(bytes([channel]) + data[: self.out_left])
                raise Cut
        await self.socket.send_bytes(bytes([channel]) + data)

    async def _finish(self, report: dict[str, Any] | None) -> None:
        if self.faults.no_status:
            self.faults.no_status -= 1
        else:
            await self.socket.send_bytes(bytes([STATUS]) + json.dumps(_status(report)).encode())
        if self.faults.slow_close_s:
            await asyncio.sleep(self.faults.slow_close_s)
        await self.socket.close()


def _status(report: dict[str, Any] | None) -> dict[str, Any]:
    if report is not None and report.get("exit") == 0:
        return {"metadata": {}, "status": "Success"}
    if report is None or "error" in report:
        return {"metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
                "message": "Internal error occurred: the container ended"}  # fmt: skip
    code = report["exit"] if report.get("exit") is not None else 128 + report["signal"]
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


async def _linger(status: Channel) -> None:
    """A command whose client left is not killed: its status is awaited by nobody."""
    with contextlib.suppress(OSError, asyncio.CancelledError):
        while await status.receive() is not None:
            pass
