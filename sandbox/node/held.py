"""A spawned process whose monitor holds its streams: pseudo-terminals, and tags that clients attach to again.

The monitor relays between the process and the pipes of whoever is attached, keeps the last output for the
next one, and (with a tag) stays after the process has ended, to tell its result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import termios
from collections import deque
from typing import Any

from sandbox.node import journal, monitor, privileges, verdicts, wire
from sandbox.node.course import BLOCK, UNUSED, Course

KEPT_BYTES = 512 << 10
END_OF_FILE = b"\x04"


class Client:
    """Who is attached: a status socket and the pipes of the three streams."""

    def __init__(self, status: socket.socket, fds: list[int], position: int) -> None:
        self.status = status
        self.stdin, self.out = fds[0], {"stdout": fds[1], "stderr": fds[2]}
        self.position = position
        """Bytes of all output that it was sent or skipped."""
        for fd in fds:
            os.set_blocking(fd, False)

    def close(self, *, report: dict[str, Any] | None = None) -> None:
        if report is not None:
            with contextlib.suppress(OSError):
                wire.send(self.status, report)
        self.status.close()
        for fd in (self.stdin, *self.out.values()):
            if fd >= 0:
                os.close(fd)


class Held(Course):
    """Relays. Output is read only while there is room, so a slow client slows the process, and loses
    nothing."""

    def __init__(self, stdin: int, *course: Any, tagged: bool, pty: bool) -> None:
        super().__init__(*course)
        self._input = stdin
        self._tagged = tagged
        self._pty = pty
        self._typed = b""
        """Read from the client, not yet taken by the process."""
        self._ending = False
        """The client said that its input ends where its pipe does."""
        self._kept: deque[tuple[str, bytes]] = deque()
        self._first = self._total = 0
        """Offsets of the first kept byte and after the last."""
        self.client: Client | None = None
        self.report: dict[str, Any] | None = None
        os.set_blocking(stdin, False)

    # ---- output

    def took(self, stream: str, data: bytes) -> None:
        if self.report is not None:
            return  # a background process writes on; the process itself has ended
        self._kept.append((stream, data))
        self._total += len(data)
        self._trim()
        self._pump()

    def drop(self, fd: int) -> None:
        super().drop(fd)
        if fd == self._input:
            self._input = -1

    def room(self) -> bool:
        return self.client is None or self._total - self.client.position < KEPT_BYTES

    def _trim(self) -> None:
        sent = self._total if self.client is None else self.client.position
        while self._total - self._first > KEPT_BYTES and self._first + len(self._kept[0][1]) <= sent:
            self._first += len(self._kept.popleft()[1])

    def _next(self) -> tuple[str, bytes] | None:
        """What the client is to be sent next."""
        assert self.client is not None
        at = self._first
        for stream, data in self._kept:
            if self.client.position < at + len(data):
                return stream, data[self.client.position - at :]
            at += len(data)
        return None

    def _pump(self) -> None:
        """Send the client what its pipes take."""
        while self.client is not None and (unsent := self._next()) is not None:
            stream, data = unsent
            fd = self.client.out[stream]
            try:
                self.client.position += os.write(fd, data) if fd >= 0 else len(data)
            except BlockingIOError:
                break
            except OSError:  # it no longer reads this stream
                os.close(fd)
                self.client.out[stream] = -1
        self._trim()

    @property
    def _backlog(self) -> int:
        """The pipe that the client has to empty first, -1 if there is none."""
        unsent = self._next() if self.client is not None else None
        return self.client.out[unsent[0]] if self.client is not None and unsent is not None else -1

    # ---- input and messages

    def interests(self) -> dict[int, int]:
        wanted: dict[int, int] = {}
        if self.client is not None:
            wanted[self.client.status.fileno()] = select.POLLIN
            if self.client.stdin >= 0 and not self._typed:
                wanted[self.client.stdin] = select.POLLIN
            if self._backlog >= 0:
                wanted[self._backlog] = select.POLLOUT
        if self._typed and self._input >= 0:
            wanted[self._input] = wanted.get(self._input, 0) | select.POLLOUT
        return wanted

    def event(self, fd: int) -> None:
        if fd == self._input:
            self._type()
        elif self.client is not None and fd == self.client.status.fileno():
            self._hear()
        elif self.client is not None and fd == self.client.stdin:
            self._listen()
        else:
            self._pump()

    def _hear(self) -> None:
        """One message of the client, or its end."""
        assert self.client is not None
        try:
            message, _ = wire.receive(self.client.status)
        except OSError:
            message = None
        if message is None:
            self.client.close()
            self.client = None
            self._trim()
            if not self._tagged:
                self.kill("killed")
        elif "kill" in message:
            self.kill("killed")
        elif "signal" in message and not self.done:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child, int(message["signal"]))
        elif "resize" in message and self._pty:
            if self._input >= 0:
                set_size(self._input, message["resize"])
        elif "eof" in message:
            self._ending = True

    def _listen(self) -> None:
        """Input from the client. Its pipe's end alone ends nothing: the client may have been killed."""
        assert self.client is not None
        try:
            self._typed = os.read(self.client.stdin, BLOCK)
        except BlockingIOError:
            return
        if not self._typed:
            os.close(self.client.stdin)
            self.client.stdin = -1
        self._type()

    def _type(self) -> None:
        try:
            while self._typed and self._input >= 0:
                self._typed = self._typed[os.write(self._input, self._typed) :]
        except BlockingIOError:
            return
        except OSError:  # the process no longer reads
            self._typed = b""
            self._shut()
        if self._ending and not self._typed and self.client is not None and self.client.stdin < 0:
            self._ending = False
            self._shut()

    def _shut(self) -> None:
        """End the process's input, and let the client know by a broken pipe."""
        if self._pty and self._input >= 0:
            with contextlib.suppress(OSError):
                os.write(self._input, END_OF_FILE)
        elif self._input >= 0:
            os.close(self._input)
            self._input = -1
            if self.client is not None and self.client.stdin >= 0:
                os.close(self.client.stdin)
                self.client.stdin = -1

    # ---- clients

    def attach(self, status: socket.socket, fds: list[int], offset: int) -> None:
        """Serve this client from now on; the one before sees the end of its streams."""
        if self.client is not None:
            self.client.close(report={"detached": True})
        self.client = Client(status, fds, min(max(offset, self._first), self._total))
        with contextlib.suppress(OSError):
            wire.send(status, {"attached": self.client.position})
        self._ending = False
        self._pump()

    def joined(self, message: dict[str, Any], fds: list[int]) -> None:
        self.attach(socket.socket(fileno=fds[0]), fds[1:], message["offset"])

    def finish(self, report: dict[str, Any]) -> None:
        """Tell the result to whoever is attached, once its pipes took everything; then to all who come."""
        self.report = report
        while True:
            if self.client is not None and self._backlog < 0:
                self.client.close(report=report)
                self.client = None
            if self.client is None and not self._tagged:
                return
            self.step(None)


def run(
    spec: dict[str, Any], request: dict[str, Any], status: socket.socket, fds: list[int], door: socket.socket
) -> int:
    """fds: the client's ends of standard input, output and error, and for a tagged one the log. Returns the
    monitor's exit code."""
    fds, log = fds[:3], fds[3:]
    wake, before = monitor.prepare(spec)
    tagged = request.get("name") is not None
    if request.get("pty"):
        master, slave = os.openpty()
        set_size(master, request["pty"])
        os.fchown(slave, 0 if request["user"] == "root" or spec["single_id"] else privileges.AGENT, -1)
        pipes, outputs, stdin = [slave] * 3, {master: "stdout"}, master
    else:
        (in_r, stdin), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
        pipes, outputs = [in_r, out_w, err_w], {out_r: "stdout", err_r: "stderr"}
    child = monitor.start(spec, request, pipes, status)
    if child is None:
        return UNUSED
    for fd in set(pipes):
        os.close(fd)
    for fd in outputs:
        os.set_blocking(fd, False)
    held = Held(stdin, child, outputs, None, wake, door, tagged=tagged, pty=bool(request.get("pty")))
    held.attach(status, fds, 0)
    held.run()
    report = monitor.describe(spec, before, held.ended, held.reason)
    if log:
        record(log[0], request["token"], held, report)
        os.close(log[0])
    held.finish(report)
    return 0


def record(log: int, token: str, held: Held, report: dict[str, Any]) -> None:
    """Write the end of a tagged process into the log; where there is no room, its clients still hear of
    it."""
    result = verdicts.result(report, held.began, {})
    with contextlib.suppress(OSError):
        journal.append(log, {"end": token, "result": result})


def set_size(fd: int, size: list[int]) -> None:
    """TIOCSWINSZ: [rows, columns]."""
    try:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
