"""Frames between client, zygote and init: 4 bytes of length, JSON, and file descriptors beside them."""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEADER = struct.Struct("!I")
MAX_FDS = 16
MAX_FRAME = 64 << 20


def encode(message: dict[str, Any]) -> bytes:
    """One frame's bytes; lone surrogates (undecodable file names) survive as JSON escapes."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one frame over a blocking socket; the descriptors ride on its first byte."""
    data = encode(message)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One frame from a blocking socket, or None at its end."""
    head, fds, _, _ = socket.recv_fds(
        sock, HEADER.size, MAX_FDS, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
    )
    if len(head) < HEADER.size:
        return None, fds
    (length,) = HEADER.unpack(head)
    if length > MAX_FRAME:
        return None, fds
    body = bytearray()
    while len(body) < length:
        chunk = sock.recv(min(length - len(body), 1 << 20))
        if not chunk:
            return None, fds
        body += chunk
    return json.loads(body), fds
