"""Authenticated one-way frames from a jailed test process to the harness.

A frame is `u32 length | mac[16] | u32 sequence | u8 kind | u32 index | u8 flag | payload`. The mac is a
keyed blake2b over all that follows it, the key is fresh for every run, and the sequence counts from 0: bytes
that foreign code writes to the pipe (it can find the descriptor by trying them all) do not verify, and the
run is then marked as tampered with. This does not stop code that searches the process's own memory for the
key; docs/verifiers.md says what does and what is left.
"""

from __future__ import annotations

import os
import struct
from _blake2 import blake2b
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

MAC = 16
HEAD = struct.Struct("<IBIB")
MAX_FRAME = 1 << 20


class Kind(IntEnum):
    """What a frame says; `index` is the test's position in the collection unless stated otherwise."""

    COLLECTED = 1
    """payload: node id; flag 1: the test has a function whose return is reported by RETURNED."""
    READY = 2
    """Collection is over; index: number of tests."""
    UNCOLLECTED = 3
    """payload: node id, NUL, message; flag: 0 error, 1 skipped."""
    PHASE = 4
    """flag: phase + 4 * outcome + 16 * (xfail mark) + 32 * (a failed subtest); payload: message."""
    RETURNED = 5
    """The test function itself returned without an exception."""
    TRACE = 6
    """payload: names of the functions that ran, one a line."""
    LOADED = 7
    """payload: workspace files that were imported, one a line. A hint for the compile cache, no more."""
    PATCHED = 8
    """payload: functions of the test framework that no longer are what they were."""
    NOTE = 9
    """payload: remark for people."""
    END = 10
    """index: pytest's exit code. Nothing may follow."""


Send = Callable[[int, int, int, bytes], None]


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    index: int
    flag: int
    payload: bytes


def sender(fd: int, key: bytes) -> Send:
    """A function `send(kind, index, flag, payload)` for this process alone (forked children stay silent).

    Everything that it calls is C code captured here: replacing names in modules later changes nothing.
    """
    keyed = blake2b(key=key, digest_size=MAC)
    copy, pack, size = keyed.copy, HEAD.pack, struct.Struct("<I").pack
    write, getpid, length = os.write, os.getpid, len
    owner, sequence, limit, overhead = os.getpid(), 0, MAX_FRAME - 64, MAC + HEAD.size

    def send(kind: int, index: int, flag: int, payload: bytes) -> None:
        nonlocal sequence
        if getpid() != owner:
            return
        payload = payload[:limit]
        body = pack(sequence, kind, index, flag) + payload
        sequence += 1
        mac = copy()
        mac.update(body)
        data = size(overhead + length(payload)) + mac.digest() + body
        while data:
            data = data[write(fd, data) :]

    return send


class Receiver:
    """Parses what arrives; after the first byte that does not verify it takes nothing more."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._buffer = bytearray()
        self._sequence = 0
        self.forged = False
        """Some bytes did not come from our sender."""

    @property
    def pending(self) -> bool:
        """Whether a frame is incomplete; at the end of a run: the process died while sending, or forged."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`."""
        frames: list[Frame] = []
        if self.forged:
            return frames
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if not MAC + HEAD.size <= size <= MAX_FRAME:
                self.forged = True
                break
            if len(self._buffer) < 4 + size:
                break
            frame = self._open(bytes(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]
            if frame is None:
                self.forged = True
                break
            frames.append(frame)
        return frames

    def _open(self, data: bytes) -> Frame | None:
        mac, body = data[:MAC], data[MAC:]
        if blake2b(body, key=self._key, digest_size=MAC).digest() != mac:
            return None
        sequence, kind, index, flag = HEAD.unpack_from(body)
        if sequence != self._sequence:
            return None
        self._sequence += 1
        return Frame(kind, index, flag, body[HEAD.size :])
