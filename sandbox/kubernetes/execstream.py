"""One exec of the API server: websocket subprotocol v5.channel.k8s.io (v4 where the server has no v5).

Each message is a channel number and bytes: 0 stdin, 1 stdout, 2 stderr, 3 the final status, 4 terminal size;
v5 adds 255 with a channel number: that channel is closed (KEP-4006). Streams are bytes throughout; the exit
status comes from channel 3 alone, and its absence is unknown, not zero (kubernetes-client/python#58, #297).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from sandbox.kubernetes.official import aiohttp

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
PROTOCOLS = (V5, V4)
STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
MESSAGE = 32 << 10
"""Bytes of one message; servers split and some refuse much larger ones."""


@dataclass(frozen=True, slots=True)
class ExecStatus:
    """How the command ended: `code` is its exit code, or None where the server could not run it."""

    code: int | None
    message: str = ""


def parse_status(data: bytes) -> ExecStatus:
    """From the JSON of channel 3."""
    try:
        status: Any = json.loads(data)
    except ValueError:
        return ExecStatus(None, data.decode(errors="replace") or "the server sent no status")
    if status.get("status") == "Success":
        return ExecStatus(0)
    details: dict[str, Any] = status.get("details") or {}
    causes: list[dict[str, Any]] = details.get("causes") or []
    for cause in causes:
        if cause.get("reason") == "ExitCode":
            return ExecStatus(int(cause["message"]), str(status.get("message", "")))
    return ExecStatus(None, str(status.get("message") or status.get("reason") or data))


class ExecStream:
    """A command under way."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.protocol: str | None = socket.protocol
        self._status = b""
        self._ended = False

    @property
    def half_closes(self) -> bool:
        """Whether the end of input can be told without ending the rest."""
        return self.protocol == V5

    async def write(self, data: bytes) -> None:
        """To the command's input. OSError once the connection is gone."""
        for start in range(0, len(data), MESSAGE):
            await self._send(bytes([STDIN]) + data[start : start + MESSAGE])

    async def close_stdin(self) -> None:
        """End of input. RuntimeError if the server speaks v4 only."""
        if not self.half_closes:
            raise RuntimeError("the server has no v5.channel.k8s.io: the end of input cannot be told")
        await self._send(bytes([CLOSE, STDIN]))

    async def resize(self, rows: int, columns: int) -> None:
        """Tell a terminal its size."""
        size = json.dumps({"Width": columns, "Height": rows}).encode()
        await self._send(bytes([RESIZE]) + size)

    async def _send(self, message: bytes) -> None:
        try:
            await self._socket.send_bytes(message)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ConnectionError(f"the exec stream is gone: {error}") from error

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        """(channel, bytes) of the command's output until its end; never an empty piece.

        Raises ConnectionError if the connection ended before the server told how the command did.
        """
        async for message in self._socket:
            if message.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                break
            data: bytes = message.data.encode() if isinstance(message.data, str) else message.data
            if not data or data[0] == CLOSE:
                continue
            if data[0] == STATUS:
                self._status += data[1:]
            elif len(data) > 1 and data[0] in (STDOUT, STDERR):
                yield data[0], data[1:]
        self._ended = True
        if not self._status:
            raise ConnectionError(f"the exec stream was cut (close code {self._socket.close_code})")

    @property
    def status(self) -> ExecStatus | None:
        """None until the end; None too where the stream was cut."""
        return parse_status(self._status) if self._ended and self._status else None

    async def close(self) -> None:
        await self._socket.close()
