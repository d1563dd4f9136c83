"""HTTP/1.1 request heads, read strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

MAX_HEAD = 64 << 10
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOP = frozenset(("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
                  "te", "trailer", "transfer-encoding", "upgrade", "host", "http2-settings"))  # fmt: skip


class BadRequest(Exception):
    """A request that is answered with 400 and this sentence."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request head. `host` and `port` are None for one that is meant for the proxy itself."""

    method: str
    host: str | None
    port: int | None
    path: str
    headers: tuple[tuple[str, str], ...] = field(default=())
    length: int = 0
    """Bytes of the body."""

    def header(self, name: str) -> str:
        """A header's value, "" without it."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def forward(self) -> bytes:
        """The head to send on: one request, then the connection ends."""
        authority = self.host if self.port == 80 else f"{self.host}:{self.port}"
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {authority}", "Connection: close"]
        named = {word.strip().lower() for word in self.header("connection").split(",")}
        lines += [f"{key}: {value}" for key, value in self.headers if key.lower() not in _HOP | named]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read(reader: asyncio.StreamReader) -> Request | None:
    """The next request, None if the peer has closed. Raises BadRequest."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BadRequest("the request ends within its head") from None
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest("the request's head is too long") from None
    return parse(head)


def parse(head: bytes) -> Request:
    """A head up to and with its empty line. Raises BadRequest."""
    lines = head.decode("latin-1")[:-4].split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest("the request line is no HTTP/1.1")
    method, target, _ = words
    headers = tuple(_header(line) for line in lines[1:])
    length = _length(headers)
    if method == "CONNECT":
        host, _, port = target.rpartition(":")
        return Request(method, host, _port(port), "", headers)
    if target.startswith("/"):
        return Request(method, None, None, target, headers, length)
    try:
        parts = urlsplit(target)
        port = parts.port
    except ValueError:
        raise BadRequest("the request names no address") from None
    if parts.scheme.lower() != "http" or not parts.hostname or "@" in parts.netloc:
        raise BadRequest("only CONNECT and http: addresses are served")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Request(method, parts.hostname, 80 if port is None else _port(str(port)), path, headers, length)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not _TOKEN.fullmatch(name) or any(letter in value for letter in "\r\n\0"):
        raise BadRequest("a header is malformed")
    return name, value.strip(" \t")


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise BadRequest("the request names no port")
    return int(text)


def _length(headers: tuple[tuple[str, str], ...]) -> int:
    if any(name.lower() == "transfer-encoding" for name, _ in headers):
        raise BadRequest("a request body must have a Content-Length")
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isascii() or not lengths[0].isdigit():
        raise BadRequest("the request has no clear Content-Length")
    return int(lengths[0])
