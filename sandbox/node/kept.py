"""A bounded memory of a stream."""

from __future__ import annotations


class Kept:
    """The first and last halves of `limit` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._limit > 0:
            self._tail += data
            if len(self._tail) > 2 * self._limit:
                del self._tail[: -self._limit]

    def take(self) -> bytes:
        """Everything, or head and tail around a cut."""
        if self.total <= self._limit:
            return bytes(self._head)
        half = self._limit // 2
        both = bytes(self._head + self._tail) if self.total <= 2 * self._limit else bytes(self._tail)
        return bytes(self._head[: self._limit - half]) + (both[-half:] if half else b"")

    def discard(self) -> None:
        """Keep nothing from now on; count only."""
        self._head.clear()
        self._tail.clear()
        self._limit = 0
