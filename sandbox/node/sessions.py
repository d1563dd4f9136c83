"""What the podlet keeps of its clients: connections that come and go, and the sessions that outlive them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque

from sandbox.node import frames, mux
from sandbox.node.frames import Frame, Kind

OWN_STREAMS = 1 << 31
"""Streams from here on are opened by the podlet, those below by the client."""


class Connection:
    """One connector: bytes in, bytes out."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.parser = frames.Parser()
        self.outbox = bytearray()
        self.session: Session | None = None

    def flush(self) -> None:
        """Write what the socket takes; raises OSError when it is gone."""
        while self.outbox:
            try:
                sent = self.sock.send(memoryview(self.outbox)[: 1 << 18])
            except BlockingIOError:
                return
            del self.outbox[:sent]


class Session:
    """A client's requests and streams."""

    def __init__(
        self, token: str, reactor: PollReactor, journal: int, journal_start: int, *, creator: bool
    ) -> None:
        self.token = token
        self.creator = creator
        self.ledger = frames.Ledger()
        self.connection: Connection | None = None
        self.seen = time.monotonic()
        self.files: dict[int, int] = {}
        """Whole files on their way: stream -> descriptor."""
        self.mux = mux.Mux(self.ledger, reactor, self.emit)
        self.mux.before_report = self._tell_news
        self._journal = journal
        self._told = journal_start
        self._safe = 0
        self._next = OWN_STREAMS
        self._sent: deque[tuple[int, int]] = deque()
        """(frame, end of what it carried) of the journal's pieces that were not acknowledged yet."""

    def emit(self, data: bytes) -> None:
        """Numbered frames are kept by the ledger, so one without connection is not lost."""
        if self.connection is not None:
            self.connection.outbox += data

    def _tell_news(self) -> None:
        """Send the lines of the journal that this client was not told."""
        data = b""
        while block := os.pread(self._journal, 1 << 20, self._told + len(data)):
            data += block
        data = data[: data.rfind(b"\n") + 1]
        self._told += len(data)
        if data:
            self.mux.send(Kind.LOG, 0, data)
            self._sent.append((self.ledger.sent, self._told))

    def safe(self) -> int:
        """How many bytes of the journal this client is known to have stored."""
        while self._sent and self._sent[0][0] <= self.ledger.heard:
            self._safe = self._sent.popleft()[1]
        return self._safe

    def skip(self, end: int) -> None:
        """The journal before `end` is gone, since another client has stored it."""
        self._told = max(self._told, end)

    def take_file(self, frame: Frame) -> None:
        """A piece of a file."""
        if frame.stream not in self.files:
            self.files[frame.stream] = os.memfd_create("input", os.MFD_CLOEXEC)
        view = memoryview(frame.payload)
        while view:
            view = view[os.write(self.files[frame.stream], view) :]

    def file(self, stream: int) -> int:
        """The whole file, at its start."""
        fd = self.files.pop(stream, -1)
        if fd < 0:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def accepted(self, sock: socket.socket, port: int) -> None:
        """Hand a connection from inside the pod to the client."""
        id, self._next = self._next, self._next + 1
        self.mux.send(Kind.OPEN, id, str(port).encode())
        self.mux.add(id, sock.detach(), "both")

    def end(self) -> None:
        self.mux.close()
        for fd in self.files.values():
            os.close(fd)
        self.files.clear()


class PollReactor:
    """`mux.Reactor` over poll(2)."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self._wanted: dict[int, int] = {}

    def interest(self, fd: int, *, read: bool, write: bool) -> None:
        mask = (select.POLLIN if read else 0) | (select.POLLOUT if write else 0)
        if mask == self._wanted.get(fd, 0):
            return
        if mask:
            self.poll.register(fd, mask)
            self._wanted[fd] = mask
        else:
            with contextlib.suppress(KeyError):
                self.poll.unregister(fd)
            self._wanted.pop(fd, None)
