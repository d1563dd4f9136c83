"""Frames that survive the connection: numbered, checked, acknowledged, sent again after a reconnect.

A pod is reached through an exec stream of the API server, which may be cut at any byte, delivered one byte
at a time, or lose its tail without an error (kubernetes#60140, kata#13640). So every frame carries a
checksum; frames that matter carry a number, are kept until the other side has acknowledged them, and are
repeated on the next connection. Both ends use this module: the client and the podlet inside the pod.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

HEADER = struct.Struct(">BIIIII")  # kind, stream, number (0 = not numbered), acknowledged, length, CRC-32
MAX_PAYLOAD = 64 << 20
ACK_BYTES = 128 << 10
ACK_FRAMES = 64


class LinkBroken(Exception):
    """The bytes of this connection cannot be trusted any more: reconnect and resume."""


class Kind(IntEnum):
    """What a frame means."""

    HELLO = 1
    """Client's first: JSON with session, token and what it has received so far."""
    WELCOME = 2
    """Podlet's answer: JSON with what it has received and facts about the pod, or `error`."""
    REQUEST = 3
    """A request of the client: JSON; its streams are opened with it."""
    DATA = 4
    END = 5
    """No more data on this stream in this direction."""
    STOP = 6
    """The receiver of this stream no longer takes data."""
    CREDIT = 7
    """So many more bytes may be sent on this stream."""
    ACK = 8
    PING = 9
    PONG = 10
    BYE = 11
    """The client is done: its commands end, and the session is forgotten."""
    FILE = 12
    """Content of a whole file that a later request names by its stream."""
    OPEN = 14
    """The podlet has accepted a connection at the port in the payload; this stream carries it."""
    LOG = 13
    """Lines for the sandbox's log, from monitors that record a result before they report it."""


NUMBERED = frozenset({Kind.REQUEST, Kind.DATA, Kind.END, Kind.STOP, Kind.CREDIT, Kind.BYE,
                      Kind.FILE, Kind.LOG, Kind.OPEN})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as received."""

    kind: Kind
    stream: int
    number: int
    acknowledged: int
    payload: bytes

    def json(self) -> dict[str, Any]:
        return json.loads(self.payload)


class Parser:
    """Cuts a byte stream into frames, however it was chopped."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Raises LinkBroken for a wrong checksum or an impossible header."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            kind, stream, number, acknowledged, length, crc = HEADER.unpack_from(self._buffer)
            if length > MAX_PAYLOAD or kind not in Kind._value2member_map_:
                raise LinkBroken("the connection delivered bytes that are no frame")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            if crc != _crc(kind, stream, number, acknowledged, payload):
                raise LinkBroken("the connection delivered a damaged frame")
            yield Frame(Kind(kind), stream, number, acknowledged, payload)


def _crc(kind: int, stream: int, number: int, acknowledged: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack(">BIII", kind, stream, number, acknowledged)))


class Ledger:
    """What one side of a session has sent and received, over any number of connections."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the last frame that arrived in order."""
        self._sent = 0
        self.heard = 0
        """Number of the last frame of ours that the other side has acknowledged."""
        self._kept: deque[tuple[int, Kind, int, bytes]] = deque()
        self._owed_bytes = 0
        self._owed_frames = 0

    def encode(self, kind: Kind, stream: int = 0, payload: bytes = b"") -> bytes:
        """The bytes of a new frame; numbered kinds are kept until acknowledged."""
        number = 0
        if kind in NUMBERED:
            self._sent += 1
            number = self._sent
            self._kept.append((number, kind, stream, payload))
        return self._pack(kind, stream, number, payload)

    def _pack(self, kind: Kind, stream: int, number: int, payload: bytes) -> bytes:
        crc = _crc(kind, stream, number, self.received, payload)
        self._owed_bytes = self._owed_frames = 0  # every frame acknowledges
        return HEADER.pack(kind, stream, number, self.received, len(payload), crc) + payload

    def accept(self, frame: Frame) -> bool:
        """Whether the frame is new; raises LinkBroken if one before it is missing."""
        self.acknowledge(frame.acknowledged)
        if frame.number == 0:
            return True
        if frame.number <= self.received:
            return False
        if frame.number != self.received + 1:
            raise LinkBroken(f"frame {self.received + 1} is missing")
        self.received = frame.number
        self._owed_bytes += len(frame.payload)
        self._owed_frames += ACK_FRAMES if frame.kind is Kind.REQUEST else 1
        return True

    def acknowledge(self, number: int) -> None:
        """The other side has everything up to `number`."""
        self.heard = max(self.heard, number)
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def owes(self) -> bool:
        """Whether a bare acknowledgement is due: for a request at once, so that its sender knows whether it
        began."""
        return self._owed_bytes >= ACK_BYTES or self._owed_frames >= ACK_FRAMES

    def replay(self, received: int) -> bytes:
        """Everything that the other side, which has got `received`, still lacks."""
        self.acknowledge(received)
        if self._kept and self._kept[0][0] != received + 1:
            raise LinkBroken("the other side has forgotten what it had acknowledged")
        return b"".join(
            self._pack(kind, stream, number, payload) for number, kind, stream, payload in self._kept
        )

    @property
    def sent(self) -> int:
        """Number of the last frame of ours."""
        return self._sent
