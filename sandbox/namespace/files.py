"""Files of a namespace sandbox, from the client: bytes and tars through pipes, served by a helper inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox.base import Data, Repercussion, SandboxError, SandboxLost
from sandbox.namespace.channel import Channel, Collector, Counted, feed

Send = Callable[[dict[str, Any], list[int]], Awaitable[None]]
Lost = Callable[[str], Awaitable[SandboxLost]]


class Files:
    """File operations over one sandbox's `send`; `lost` makes the error of a sandbox that went away."""

    def __init__(self, send: Send, lost: Lost) -> None:
        self._send = send
        self._lost = lost

    async def read(self, path: str, max_bytes: int) -> bytes:
        message = {"op": "read", "path": path, "max_bytes": max_bytes}
        reply, data = await self._transfer(message, None, max_bytes)
        if len(data) != reply["bytes"]:
            raise await self._lost(f"read {len(data)} of {reply['bytes']} bytes of {path}")
        return data

    async def write(self, path: str, data: Data, mode: int) -> None:
        source = Counted(data)
        reply, _ = await self._transfer({"op": "write", "path": path, "mode": mode}, source)
        if reply["bytes"] != source.total:
            raise await self._lost(f"wrote {reply['bytes']} of {source.total} bytes of {path}")

    async def put_tree(self, path: str, tar: Data) -> None:
        await self._transfer({"op": "put_tree", "path": path}, tar)

    async def get_tree(self, path: str, max_bytes: int) -> bytes:
        message = {"op": "get_tree", "path": path, "max_bytes": max_bytes}
        _, data = await self._transfer(message, None, 2 * max_bytes + (64 << 20))
        return data

    async def upper(self) -> bytes:
        """The writable layer as a tar."""
        _, data = await self._transfer({"op": "snapshot"}, None, 4 << 30)
        return data

    async def _transfer(
        self, message: dict[str, Any], data: Data | None, limit: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """Run a file operation: send `data`, or receive at most `limit` bytes."""
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        inner, outer = (write_end, read_end) if data is None else (read_end, write_end)
        channel = Channel(ours)
        collector: Collector | None = None
        feeder: asyncio.Task[None] | None = None
        try:
            try:
                await self._send(message, [theirs.fileno(), inner])
            finally:
                theirs.close()
                os.close(inner)
            if data is None:
                collector = Collector(outer, limit)
            else:
                feeder = asyncio.create_task(feed(outer, data))
            reply = await channel.receive()
            if reply is None:
                raise await self._lost(f"it died during {message['op']} of {message.get('path')}")
            if collector is not None:
                await collector.ended
            if feeder is not None and reply.get("ok"):
                await feeder
            _raise(reply)
            return reply, collector.take() if collector is not None else b""
        finally:
            channel.close()
            if collector is not None:
                collector.close()
            elif feeder is None:
                os.close(outer)
            if feeder is not None:
                feeder.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeder


def _raise(reply: dict[str, Any]) -> None:
    if reply.get("ok"):
        return
    kind, text = reply.get("kind"), reply["error"]
    if kind == "os":
        raise OSError(reply["errno"], text, reply["path"])
    if kind == "refused":
        raise ValueError(text)
    if kind == "pids":
        raise SandboxLost(
            f"what commands left running fills the process limit: {text}", Repercussion.PROCESSES
        )
    raise SandboxError(text)
