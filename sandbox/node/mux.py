"""Descriptors carried over one link: what `sendmsg` does on a socket, for two machines.

A request names descriptors (a pipe to read, a pipe to write, a socket for both); each becomes a stream
whose other end lies in the other process. Each stream has its own window, so a reader that stalls holds up
nobody else. Client and podlet use the same class, each with its own event loop (`Reactor`).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import stat
import termios
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sandbox.node.frames import Frame, Kind, Ledger

WINDOW = 512 << 10
"""Bytes of one stream that may be under way."""
CHUNK = 64 << 10


class Reactor(Protocol):
    """The event loop: calls `Mux.readable` and `Mux.writable` as asked here."""

    def interest(self, fd: int, *, read: bool, write: bool) -> None: ...


def kind_of(fd: int) -> str:
    """What the other side must make for `fd`: `read` (we have a pipe's read end), `write`, `both` (a socket),
    `file` (its whole content), `log` (a file that is appended to), `null`."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return "log" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND else "file"
    if stat.S_ISSOCK(mode):
        return "both"
    if stat.S_ISFIFO(mode):
        return "read" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY else "write"
    return "null"


class Stream:
    """One descriptor of ours, and what is known of its other end."""

    def __init__(self, id: int, fd: int, *, reads: bool, writes: bool) -> None:
        self.id = id
        self.fd = fd
        self.reads = reads
        """We still read the descriptor and send what it gives."""
        self.writes = writes
        """We still write to it what the other side sends."""
        self.credit = WINDOW
        self.pending = bytearray()
        self.last = False
        """The other side has sent its END; it holds once `pending` is written."""
        self.taken = 0
        self.behind: list[tuple[Stream, int]] = []
        """Streams of which so many bytes must be read before this one is read (output before the report)."""
        self.follows: tuple[Stream, ...] = ()
        self.reports = False
        self.total = 0


class Mux:
    """All streams of one session. `emit` gets every frame's bytes as they arise."""

    def __init__(self, ledger: Ledger, reactor: Reactor, emit: Callable[[bytes], None]) -> None:
        self._ledger = ledger
        self._reactor = reactor
        self._emit = emit
        self._streams: dict[int, Stream] = {}
        self._by_fd: dict[int, Stream] = {}
        self._next = 1
        self.before_report: Callable[[], None] | None = None
        """Called before a report is read: what was recorded must arrive before it is reported."""

    def send(self, kind: Kind, stream: int = 0, payload: bytes = b"") -> None:
        self._emit(self._ledger.encode(kind, stream, payload))

    # ---- opening

    def reserve(self, count: int) -> list[int]:
        """Fresh stream numbers; only the client gives them out."""
        first = self._next
        self._next += count
        return list(range(first, self._next))

    def add(self, id: int, fd: int, kind: str) -> Stream:
        """Carry `fd` (now ours) as stream `id`; `kind` as of `kind_of`."""
        os.set_blocking(fd, False)
        stream = Stream(id, fd, reads=kind in ("read", "both"), writes=kind in ("write", "both"))
        self._streams[id] = self._by_fd[fd] = stream
        self._tell(stream)
        return stream

    def order(self, report: Stream, outputs: Sequence[Stream]) -> None:
        """What lies in `outputs` when `report` becomes readable is sent before it."""
        report.reports = True
        report.follows = tuple(outputs)

    def _tell(self, stream: Stream) -> None:
        held = any(other.total < goal and other.reads for other, goal in stream.behind)
        self._reactor.interest(
            stream.fd,
            read=stream.reads and stream.credit > 0 and not held,
            write=bool(stream.pending) or (stream.last and stream.writes),
        )

    # ---- events of the loop

    def readable(self, fd: int) -> None:
        stream = self._by_fd.get(fd)
        if stream is None or not stream.reads or stream.credit <= 0:
            return
        if stream.follows and not stream.behind:
            stream.behind = [
                (other, other.total + _waiting(other.fd)) for other in stream.follows if other.reads
            ]
        if any(other.total < goal and other.reads for other, goal in stream.behind):
            for other, _ in stream.behind:
                self.readable(other.fd)
            if any(other.total < goal and other.reads for other, goal in stream.behind):
                self._tell(stream)
                return
        self._read(stream)

    def _read(self, stream: Stream) -> None:
        if stream.reports and self.before_report is not None:
            self.before_report()
        try:
            data = os.read(stream.fd, min(CHUNK, stream.credit))
        except BlockingIOError:
            return
        except OSError:  # a reset socket, a terminal whose other side is closed
            data = b""
        if not data:
            stream.reads = False
            self.send(Kind.END, stream.id)
        else:
            stream.credit -= len(data)
            stream.total += len(data)
            self.send(Kind.DATA, stream.id, data)
        self._settle(stream)
        self._release(stream)

    def _release(self, stream: Stream) -> None:
        """Reports that waited for `stream` may be due."""
        for other in list(self._streams.values()):
            if any(each is stream for each, _ in other.behind):
                self._tell(other)

    def writable(self, fd: int) -> None:
        stream = self._by_fd.get(fd)
        if stream is None:
            return
        while stream.pending:
            try:
                written = os.write(fd, memoryview(stream.pending)[:CHUNK])
            except BlockingIOError:
                break
            except OSError:  # nobody reads any more
                self._refuse(stream)
                break
            del stream.pending[:written]
            stream.taken += written
        if stream.taken >= WINDOW // 4:
            self.send(Kind.CREDIT, stream.id, str(stream.taken).encode())
            stream.taken = 0
        if stream.last and stream.writes and not stream.pending:
            stream.writes = False
            if stream.reads:  # a pipe is closed by `_settle`
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                    sock.shutdown(socket.SHUT_WR)
        self._settle(stream)

    def _refuse(self, stream: Stream) -> None:
        stream.pending.clear()
        if stream.writes and not stream.last:
            self.send(Kind.STOP, stream.id)
        stream.writes = False

    def _settle(self, stream: Stream) -> None:
        if stream.reads or stream.writes:
            self._tell(stream)
        elif stream.fd >= 0:
            self._reactor.interest(stream.fd, read=False, write=False)
            self._by_fd.pop(stream.fd, None)
            self._streams.pop(stream.id, None)
            os.close(stream.fd)
            stream.fd = -1

    # ---- frames of the other side

    def frame(self, frame: Frame) -> None:
        """DATA, END, STOP or CREDIT; what belongs to a stream that is gone is dropped."""
        stream = self._streams.get(frame.stream)
        if stream is None:
            return
        if frame.kind is Kind.DATA:
            if stream.writes:
                stream.pending += frame.payload
                self.writable(stream.fd)
        elif frame.kind is Kind.END:
            stream.last = True
            self.writable(stream.fd)
        elif frame.kind is Kind.STOP:
            stream.reads = False
            self._settle(stream)
            self._release(stream)
        elif frame.kind is Kind.CREDIT:
            stream.credit += int(frame.payload)
            self._tell(stream)
            self._release(stream)

    def close(self) -> None:
        """Close every descriptor; who holds the other ends sees them end."""
        for stream in list(self._streams.values()):
            stream.reads = stream.writes = False
            self._settle(stream)

    def reading(self, fd: int) -> bool:
        """Whether the descriptor is one that we read."""
        return fd in self._by_fd and self._by_fd[fd].reads

    @property
    def descriptors(self) -> list[int]:
        return list(self._by_fd)


def _waiting(fd: int) -> int:
    """Bytes that lie in the pipe."""
    size = array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, size)
    except OSError:
        return 0
    return size[0]


def make(kind: str) -> tuple[int, int]:
    """(our end, the end for a child) of what the other side's `kind` asks for."""
    if kind == "both":
        ours, theirs = socket.socketpair()
        return ours.detach(), theirs.detach()
    if kind == "null":
        return -1, os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    read_end, write_end = os.pipe()
    return (write_end, read_end) if kind == "read" else (read_end, write_end)


def mirror(kind: str) -> str:
    """The kind of our end for the other side's."""
    return {"read": "write", "write": "read"}.get(kind, kind)


def streams(message: dict[str, Any]) -> list[tuple[int, str]]:
    """(number, kind) of a request's descriptors, in their order."""
    return [(int(id), str(kind)) for id, kind in message["streams"]]
