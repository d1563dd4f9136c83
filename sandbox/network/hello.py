"""The server name of a TLS ClientHello (RFC 8446, 6066): it holds a tunnel to the name it was opened for."""

from __future__ import annotations

import asyncio

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME = 22, 1, 0
_MAX_RECORD = 16384


class NoHello(Exception):
    """What came is no ClientHello in one record."""


async def read(reader: asyncio.StreamReader) -> tuple[bytes, str | None]:
    """The first record, and the server name in it. Raises NoHello."""
    try:
        head = await reader.readexactly(5)
        length = int.from_bytes(head[3:5], "big")
        if head[0] != _HANDSHAKE or head[1] != 3 or not 4 <= length <= _MAX_RECORD:
            raise NoHello
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise NoHello from None
    return head + body, server_name(body)


def server_name(body: bytes) -> str | None:
    """The server name of a handshake record's body, None without one. Raises NoHello."""
    try:
        return _parse(_Bytes(body))
    except (IndexError, UnicodeDecodeError):
        raise NoHello from None


class _Bytes:
    """Reads from the front; IndexError beyond the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        if count > len(self.data):
            raise IndexError
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def block(self, count: int) -> _Bytes:
        return _Bytes(self.take(self.number(count)))


def _parse(record: _Bytes) -> str | None:
    if record.number(1) != _CLIENT_HELLO:
        raise NoHello
    hello = record.block(3)
    hello.take(2 + 32)  # version, random
    hello.block(1)  # session
    hello.block(2)  # cipher suites
    hello.block(1)  # compression
    if not hello.data:
        return None
    extensions = hello.block(2)
    while extensions.data:
        kind, content = extensions.number(2), extensions.block(2)
        if kind == _SERVER_NAME:
            names = content.block(2)
            while names.data:
                name_kind, name = names.number(1), names.block(2)
                if name_kind == 0:
                    return name.data.decode("ascii")
    return None
